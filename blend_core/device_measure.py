"""Measures the CPU at hand, so that plans and predictions are made for it and not for a generic one."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from blend_core.specs import DeviceProfile

GEMM_TOKENS: Final = (8, 32, 128, 512)
"""Tokens of the steps that are timed."""


@dataclass(frozen=True, slots=True)
class MeasureSizes:
    """What is timed.

    Attributes:
        hidden_size: width of the layer; it should be near the model's to serve.
        intermediate_size: width of its MLP.
        num_kv_heads: KV heads of the attention that is timed.
        num_query_heads_per_kv_head: query heads that read each of them.
        head_size: width of a head.
        context_tokens: KV tokens that each decoding request reads.
        stream_bytes: bytes that are read to tell the bandwidth, and KV bytes that decode attention reads; far
            more than the caches hold.
        num_repeats: times each thing is done; the fastest counts.
    """

    hidden_size: int = 576
    intermediate_size: int = 1536
    num_kv_heads: int = 3
    num_query_heads_per_kv_head: int = 3
    head_size: int = 64
    context_tokens: int = 1024
    stream_bytes: int = 256 << 20
    num_repeats: int = 5


def measure_cpu_profile(
    name: str,
    kv_capacity_bytes: float = 1e9,
    sizes: MeasureSizes | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> DeviceProfile:
    """Times a layer's matrix products, its decode attention and a pass over memory; a few seconds.

    All is done in fp32 on numpy's threads. GEMM seconds are fitted as `fixed + per_token * tokens`
    (BlendServe table 1 shows that form). The peaks are the best rates seen: `gemm_efficiency` is the fitted
    rate of large steps over the one, `attention_bandwidth_efficiency` the rate at which decode attention
    reads KV over the other. Decode attention on a CPU is bound by the same cores as GEMM, so overlap hides
    nothing; that is stated, not measured.

    Args:
        name: name of the profile.
        kv_capacity_bytes: memory to give to KV.
        sizes: what is timed; a layer of SmolLM2-135M by default.
        clock: seconds that only rise.
    """
    sizes = sizes or MeasureSizes()
    durations_s = np.array([_layer_s(tokens, sizes, clock) for tokens in GEMM_TOKENS])
    tokens = np.array(GEMM_TOKENS, dtype=np.float64)
    flops_per_token = 2.0 * _layer_elements(sizes)
    # Relative residuals: otherwise the largest step alone would fix the line.
    weights = 1.0 / durations_s
    design = np.stack((np.ones_like(tokens), tokens), axis=1) * weights[:, None]
    fixed_s, per_token_s = np.linalg.lstsq(design, durations_s * weights, rcond=None)[0]
    if per_token_s <= 0:
        # Noise was larger than the slope: the largest step alone has to tell it.
        fixed_s, per_token_s = 0.0, durations_s[-1] / tokens[-1]
    fitted_rate = flops_per_token / float(per_token_s)
    attention_bytes_per_s = _attention_bytes_per_s(sizes, clock)
    bandwidth_bytes_per_s = max(_stream_bytes_per_s(sizes, clock), attention_bytes_per_s)
    peak = max(fitted_rate, float((flops_per_token * tokens / durations_s).max()))
    return DeviceProfile(
        name=name,
        compute_flops_per_s=peak,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        kv_capacity_bytes=kv_capacity_bytes,
        gemm_efficiency=fitted_rate / peak,
        gemm_fixed_s_per_layer=max(float(fixed_s), 0.0),
        attention_bandwidth_efficiency=attention_bytes_per_s / bandwidth_bytes_per_s,
        overlap_interference=1.0,
    )


def _layer_elements(sizes: MeasureSizes) -> int:
    return 4 * sizes.hidden_size**2 + 3 * sizes.hidden_size * sizes.intermediate_size


def _layer_s(num_tokens: int, sizes: MeasureSizes, clock: Callable[[], float]) -> float:
    """Fastest seconds of one layer's matrix products over `num_tokens` tokens."""
    generator = np.random.default_rng(0)
    hidden, intermediate = sizes.hidden_size, sizes.intermediate_size
    shapes = [(hidden, hidden)] * 4 + [(hidden, intermediate)] * 2 + [(intermediate, hidden)]
    weights = [generator.standard_normal(shape, dtype=np.float32) for shape in shapes]
    inputs = {
        width: generator.standard_normal((num_tokens, width), dtype=np.float32)
        for width in (hidden, intermediate)
    }

    def run() -> None:
        for weight in weights:
            inputs[weight.shape[0]] @ weight

    return _fastest_s(run, sizes.num_repeats, clock)


def _stream_bytes_per_s(sizes: MeasureSizes, clock: Callable[[], float]) -> float:
    stream = np.ones(sizes.stream_bytes // 8, dtype=np.float64)

    def run() -> None:
        stream.sum()

    return stream.nbytes / _fastest_s(run, sizes.num_repeats, clock)


def _attention_bytes_per_s(sizes: MeasureSizes, clock: Callable[[], float]) -> float:
    """KV bytes per second of one token each of as many requests as have `stream_bytes` of KV."""
    request_bytes = 2 * 4 * sizes.num_kv_heads * sizes.context_tokens * sizes.head_size
    shape = (max(sizes.stream_bytes // request_bytes, 1), sizes.num_kv_heads)
    keys, values = (
        np.ones((*shape, sizes.context_tokens, sizes.head_size), dtype=np.float32) for _ in range(2)
    )
    queries = np.ones((*shape, sizes.num_query_heads_per_kv_head, sizes.head_size), dtype=np.float32)

    def run() -> None:
        scores = queries @ np.swapaxes(keys, -1, -2)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        scores @ values

    return (keys.nbytes + values.nbytes) / _fastest_s(run, sizes.num_repeats, clock)


def _fastest_s(run: Callable[[], None], num_repeats: int, clock: Callable[[], float]) -> float:
    run()  # The first one pays for pages and threads.
    durations_s = []
    for _ in range(num_repeats):
        started = clock()
        run()
        durations_s.append(clock() - started)
    return max(min(durations_s), 1e-9)
