"""The performance model: what a request, a step and a whole batch cost on a device.

Two sets of figures live here and are not mixed. *Peak* figures (`compute_s`, `memory_s`, `step_cost`) make
densities: FLOPs over peak FLOP/s and KV bytes over peak bandwidth (BlendServe §4.1). *Timed* figures
(`StepTimeModel`, `practical_optimum_s`) predict durations: GEMM time is affine in the tokens of a step and
never under the time to read the weights, decode attention reaches a share of the bandwidth, and
overlap hides all but a share of the shorter one.

`H` of the formulas is the width of attention, `num_heads * head_size`; it equals the hidden size for Llama.
`P` is the parameters that one token passes: of a mixture of experts, those of the experts it is sent to.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from blend_core.specs import DeviceProfile, ModelSpec

Floats = npt.NDArray[np.float64]
TokenCounts = npt.ArrayLike

MAX_NUM_BATCHED_TOKENS: Final = 2048
"""Tokens of one step at most, in the setting that published figures of ours compare by."""

DEAR_PREFIX_STEPS: Final = 2
"""A prefix that fills so many steps is dear to compute again. No prompt of the paper's workloads shares as
much at its 2,048 tokens a step."""


def compute_s(
    model: ModelSpec,
    device: DeviceProfile,
    num_prompt_tokens: TokenCounts,
    num_output_tokens: TokenCounts,
    num_cached_tokens: TokenCounts = 0,
) -> Floats:
    """Returns the seconds of compute of requests at peak FLOP/s; arguments broadcast.

    `(2 (p - c + d) P + 2 H L (p^2 - c^2)) / compute` (BlendServe §4.1 with causal prefill attention),
    where the `c` leading prompt tokens come from the cache and cost nothing.
    """
    cached = np.asarray(num_cached_tokens, dtype=np.float64)
    prompt = np.asarray(num_prompt_tokens, dtype=np.float64)
    linear = (
        2.0 * model.parameters_per_token * (prompt - cached + np.asarray(num_output_tokens, dtype=np.float64))
    )
    attention = _attention_flops_per_token_sq(model) * (prompt * prompt - cached * cached)
    return np.asarray((linear + attention) / device.compute_flops_per_s, dtype=np.float64)


def memory_s(
    model: ModelSpec,
    device: DeviceProfile,
    num_prompt_tokens: TokenCounts,
    num_output_tokens: TokenCounts,
    num_output_tokens_sq: TokenCounts | None = None,
) -> Floats:
    """Returns the seconds that the decode steps of requests read KV at peak bandwidth; arguments broadcast.

    `(p d + d^2 / 2) kv / bandwidth` (BlendServe §4.1). With estimated lengths pass `E[d]` and `E[d^2]`:
    the formula is convex in `d`, so the square of the mean understates it. Without `num_output_tokens_sq` the
    lengths are exact.
    """
    output = np.asarray(num_output_tokens, dtype=np.float64)
    output_sq = (
        output * output
        if num_output_tokens_sq is None
        else np.asarray(num_output_tokens_sq, dtype=np.float64)
    )
    kv_tokens = np.asarray(num_prompt_tokens, dtype=np.float64) * output + output_sq / 2.0
    return np.asarray(kv_tokens * model.kv_bytes_per_token / device.bandwidth_bytes_per_s, dtype=np.float64)


def num_kv_blocks(model: ModelSpec, kv_capacity_bytes: float, block_size: int) -> int:
    """Returns the KV blocks of `block_size` tokens that so many bytes hold."""
    return int(kv_capacity_bytes) // (block_size * model.kv_bytes_per_token)


def compute_density(compute: TokenCounts, memory: TokenCounts) -> Floats:
    """Returns `compute / memory`, infinite where no KV is read. Above 1 is compute-intensive."""
    compute_array = np.asarray(compute, dtype=np.float64)
    memory_array = np.asarray(memory, dtype=np.float64)
    shape = np.broadcast_shapes(compute_array.shape, memory_array.shape)
    return np.asarray(
        np.divide(compute_array, memory_array, out=np.full(shape, np.inf), where=memory_array > 0),
        dtype=np.float64,
    )


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step, or the sum of several, at the device's peak figures.

    Attributes:
        compute_s: seconds of GEMM and prefill attention.
        memory_s: seconds of reading KV in decode attention.
    """

    compute_s: float
    memory_s: float

    @property
    def density(self) -> float | None:
        """`compute_s / memory_s`, None where no KV was read."""
        return self.compute_s / self.memory_s if self.memory_s > 0 else None


def step_cost(
    model: ModelSpec,
    device: DeviceProfile,
    num_tokens: float,
    prefill_tokens_sq: float,
    decode_kv_tokens: float,
) -> StepCost:
    """Returns what a step costs at peak figures; linear, so sums over the steps of a window go in as well.

    Args:
        model: sizes of the model.
        device: abilities of the device.
        num_tokens: prefill and decode tokens computed.
        prefill_tokens_sq: sum over prefill chunks of `(c + t)^2 - c^2`, `t` tokens after `c` earlier ones.
        decode_kv_tokens: sum over decode tokens of the KV tokens read.
    """
    flops = (
        2.0 * model.parameters_per_token * num_tokens
        + _attention_flops_per_token_sq(model) * prefill_tokens_sq
    )
    return StepCost(
        compute_s=flops / device.compute_flops_per_s,
        memory_s=decode_kv_tokens * model.kv_bytes_per_token / device.bandwidth_bytes_per_s,
    )


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Coefficients of a step's predicted duration on one device; derive them once per simulation.

    Attributes:
        gemm_fixed_s: seconds of all layers whatever the tokens.
        gemm_s_per_token: seconds of GEMM per token of the step.
        weight_read_s: seconds to read the weights, the floor of a step's GEMM time.
        prefill_s_per_token_sq: seconds of prefill attention per unit of `prefill_tokens_sq`.
        decode_s_per_kv_token: seconds of decode attention per KV token read.
        overlap_interference: share of the shorter part that overlap cannot hide.
    """

    gemm_fixed_s: float
    gemm_s_per_token: float
    weight_read_s: float
    prefill_s_per_token_sq: float
    decode_s_per_kv_token: float
    overlap_interference: float

    @classmethod
    def of(cls, model: ModelSpec, device: DeviceProfile) -> "StepTimeModel":
        """Returns the coefficients of `model` on `device`."""
        return cls(
            gemm_fixed_s=device.gemm_fixed_s_per_layer * model.num_layers,
            gemm_s_per_token=2.0
            * model.parameters_per_token
            / (device.compute_flops_per_s * device.gemm_efficiency),
            weight_read_s=float(model.num_parameters * model.dtype_bytes) / device.bandwidth_bytes_per_s,
            prefill_s_per_token_sq=_attention_flops_per_token_sq(model) / device.compute_flops_per_s,
            decode_s_per_kv_token=model.kv_bytes_per_token
            / (device.bandwidth_bytes_per_s * device.attention_bandwidth_efficiency),
            overlap_interference=device.overlap_interference,
        )

    def gemm_s(self, num_tokens: int) -> float:
        """Seconds of GEMM of a step: affine in its tokens, never under the weight read, 0 without tokens."""
        if num_tokens == 0:
            return 0.0
        return max(self.gemm_fixed_s + self.gemm_s_per_token * num_tokens, self.weight_read_s)

    def combined_s(self, compute_time_s: float, decode_time_s: float, *, overlap: bool) -> float:
        """Seconds that both parts take: their sum, or with overlap the longer plus what cannot be hidden."""
        if not overlap:
            return compute_time_s + decode_time_s
        longer, shorter = max(compute_time_s, decode_time_s), min(compute_time_s, decode_time_s)
        return longer + self.overlap_interference * shorter

    def step_s(
        self, num_tokens: int, prefill_tokens_sq: int, decode_kv_tokens: int, *, overlap: bool
    ) -> float:
        """Predicted seconds of one step; arguments as in `step_cost`."""
        compute_time_s = self.gemm_s(num_tokens) + self.prefill_s_per_token_sq * prefill_tokens_sq
        return self.combined_s(compute_time_s, self.decode_s_per_kv_token * decode_kv_tokens, overlap=overlap)


@dataclass(frozen=True, slots=True)
class WorkTotals:
    """What requests amount to, with `u` the unshared of their `p` prompt tokens.

    Attributes:
        num_tokens: `sum u + sum d`, the tokens to compute.
        prefill_tokens_sq: `sum p^2 - (p - u)^2`.
        decode_kv_tokens: `sum p d + d^2 / 2`, the KV tokens that decoding reads.
        held_kv_tokens: `sum u d + d^2 / 2`, the KV tokens held, summed over steps.
        longest_output_tokens: `max d`.
    """

    num_tokens: float
    prefill_tokens_sq: float
    decode_kv_tokens: float
    held_kv_tokens: float
    longest_output_tokens: float

    @classmethod
    def of(
        cls,
        num_prompt_tokens: TokenCounts,
        num_shared_tokens: TokenCounts,
        num_output_tokens: TokenCounts,
        num_output_tokens_sq: TokenCounts | None = None,
    ) -> "WorkTotals":
        """Returns the totals of at least one request; arguments as of `practical_optimum_s`."""
        prompt = np.asarray(num_prompt_tokens, dtype=np.float64)
        shared = np.asarray(num_shared_tokens, dtype=np.float64)
        output = np.asarray(num_output_tokens, dtype=np.float64)
        output_sq = (
            output * output
            if num_output_tokens_sq is None
            else np.asarray(num_output_tokens_sq, dtype=np.float64)
        )
        return cls(
            num_tokens=float((prompt - shared).sum() + output.sum()),
            prefill_tokens_sq=float((prompt * prompt - shared * shared).sum()),
            decode_kv_tokens=float((prompt * output + output_sq / 2.0).sum()),
            held_kv_tokens=float(((prompt - shared) * output + output_sq / 2.0).sum()),
            longest_output_tokens=float(output.max()),
        )

    def num_steps(
        self, model: ModelSpec, device: DeviceProfile, max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    ) -> float:
        """Returns the steps that the requests need at least, `S` of `optimum_of_totals_s`."""
        return max(
            self.held_kv_tokens * model.kv_bytes_per_token / device.kv_capacity_bytes,
            self.num_tokens / max_num_batched_tokens,
            self.longest_output_tokens,
        )


def practical_optimum_s(
    model: ModelSpec,
    device: DeviceProfile,
    num_prompt_tokens: TokenCounts,
    num_shared_tokens: TokenCounts,
    num_output_tokens: TokenCounts,
    num_output_tokens_sq: TokenCounts | None = None,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
) -> float:
    """Returns the seconds an ideal overlap engine would take for the requests; no request: 0.

    All token arguments are `(num_requests,)`; see `optimum_of_totals_s` for the formula.

    Args:
        model: sizes of the model.
        device: abilities of the device; `kv_capacity_bytes` gives `M` in tokens.
        num_prompt_tokens: `p`.
        num_shared_tokens: prompt tokens of each that another request computes: every segment once.
        num_output_tokens: `d`, or `E[d]`.
        num_output_tokens_sq: `E[d^2]`; None where the lengths are exact.
        max_num_batched_tokens: tokens of one step at most.
    """
    if np.size(num_prompt_tokens) == 0:
        return 0.0
    totals = WorkTotals.of(num_prompt_tokens, num_shared_tokens, num_output_tokens, num_output_tokens_sq)
    return optimum_of_totals_s(model, device, totals, max_num_batched_tokens)


def optimum_of_totals_s(
    model: ModelSpec,
    device: DeviceProfile,
    totals: WorkTotals,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
) -> float:
    """Returns the practical optimum of all requests together (after BlendServe §6.2).

    `n` tokens need `S = max(sum(u d + d^2 / 2) / M, n / max_num_batched_tokens, max d)` steps; compute and KV
    reading of all of them overlap like those of one step do.
    """
    times = StepTimeModel.of(model, device)
    num_steps = totals.num_steps(model, device, max_num_batched_tokens)
    compute_time_s = (
        times.gemm_fixed_s * num_steps
        + times.gemm_s_per_token * totals.num_tokens
        + times.prefill_s_per_token_sq * totals.prefill_tokens_sq
    )
    decode_time_s = times.decode_s_per_kv_token * totals.decode_kv_tokens
    return times.combined_s(compute_time_s, decode_time_s, overlap=True)


def _attention_flops_per_token_sq(model: ModelSpec) -> float:
    """Causal prefill attention: `2 H L` FLOPs for each unit of `(c + t)^2 - c^2`."""
    return 2.0 * model.attention_width * model.num_layers
