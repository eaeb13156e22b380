"""The mixes of the studies: how many requests of each kind give a density, a sharing and a length.

Kinds and targets follow BlendServe §6.1; densities are at peak figures, with shared segments once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from blend_core.errors import PlanError
from blend_core.performance import compute_s, memory_s
from blend_core.specs import DeviceProfile, ModelSpec
from blend_core.studies import trace_lengths
from blend_core.studies.pools import (
    Draw,
    Pool,
    alternating,
    block_trace,
    concatenated,
    few_shot,
    generated,
    resampled,
)
from blend_core.studies.workload import Workload, seen_tokens, workload_figures

Floats = npt.NDArray[np.float64]

_PILOT_ROWS = 4_000
_MAX_ROUNDS = 40


@dataclass(frozen=True, slots=True)
class Mix:
    """Kinds of requests and what their mix must amount to.

    Attributes:
        name: the workload's name in tables.
        draws: one per kind.
        density: compute density of the whole, at peak figures.
        prefix_sharing: share of prompt tokens that are shared; None where the kinds decide.
        data: `real` or `generated` lengths.
    """

    name: str
    draws: tuple[Draw, ...]
    density: float
    prefix_sharing: float | None
    data: str


@dataclass(frozen=True, slots=True)
class Setting:
    """What a mix is solved for.

    Attributes:
        model: sizes of the model.
        device: abilities of the device.
        block_size: tokens of a KV block.
        hours: practical optimum of the whole mix.
    """

    model: ModelSpec
    device: DeviceProfile
    block_size: int
    hours: float


def paper_mix(
    traces: Path | None, name: str, density: float, prefix_sharing: float, *, preset: bool = True
) -> Mix:
    """Azure code (compute side), video-like (memory side) and MMLU 5-shot (sharing side).

    With `preset` the video lengths are known beforehand; without, no length is.
    """
    draws = (
        resampled(trace_lengths.azure_code(traces)),
        generated(trace_lengths.video_like, preset=preset),
        few_shot(trace_lengths.mmlu_5shot(traces), np.array([2])),
    )
    return Mix(name, draws, density, prefix_sharing, _data(traces))


PAPER_TARGETS = (
    ("trace-1", 1.4, 0.35),
    ("trace-2", 0.9, 0.35),
    ("trace-3", 1.4, 0.05),
    ("trace-4", 0.9, 0.05),
)
"""Name, density and prefix sharing of the paper's four traces."""


def grid_targets() -> list[tuple[str, float, float]]:
    """The paper's 65 workloads: density 0.80 to 1.40 by 0.05, sharing 0.05 to 0.45 by 0.10."""
    return [
        (f"density-{density / 100:.2f}-sharing-{sharing / 100:.2f}", density / 100, sharing / 100)
        for density in range(80, 141, 5)
        for sharing in range(5, 46, 10)
    ]


def real_mixes(traces: Path) -> list[Mix]:
    """Mixes of published traces at density 1.0, no length preset."""
    r1 = resampled(trace_lengths.deepseek_r1(traces))
    azure = resampled(trace_lengths.azure_code(traces))
    mmlu = trace_lengths.mmlu_5shot(traces)
    chat = alternating([resampled(trace_lengths.sharegpt(traces)), resampled(trace_lengths.gsm8k(traces))])
    kinds: dict[str, tuple[Draw, ...]] = {
        "mmlu+r1": (few_shot(mmlu, np.array([2])), r1),
        "azure+r1": (azure, r1),
        "sharegpt+gsm8k+r1": (chat, r1),
        "mooncake+r1": (block_trace(trace_lengths.mooncake_conversation(traces)), r1),
        "lmsys+r1": (resampled(trace_lengths.lmsys(traces)), r1),
        "wildbench+azure": (few_shot(mmlu, trace_lengths.wildbench_outputs(traces)), azure),
    }
    return [Mix(name, draws, 1.0, None, "real") for name, draws in kinds.items()]


def build_workload(mix: Mix, setting: Setting, seed: int) -> Workload:
    """Draws the requests of a mix; the same seed gives the same workload.

    A kind that has fewer requests than the mix asks for is used up, and the others are cut to keep the
    density.

    Raises:
        PlanError: no numbers of these kinds reach the density and the sharing.
    """
    children = np.random.SeedSequence(seed).spawn(len(mix.draws) + 1)
    pools = [_drawn(draw, child, _PILOT_ROWS) for draw, child in zip(mix.draws, children, strict=False)]
    counts = np.zeros(len(pools), dtype=np.int64)
    for _ in range(_MAX_ROUNDS):
        previous = counts
        counts = _solve(mix, setting, pools, counts)
        for index, count in enumerate(counts):
            if count > len(pools[index]):
                pools[index] = _drawn(mix.draws[index], children[index], int(count * 1.1))
        counts = np.minimum(counts, [len(pool) for pool in pools])
        if np.all(np.abs(counts - previous) <= np.maximum(1, counts // 1000)):
            break
    taken = concatenated([_head(pool, int(count)) for pool, count in zip(pools, counts, strict=True)])
    # Arrival order: the kinds thoroughly mixed, as requests of a night lie in their table.
    arrival = np.random.default_rng(children[-1]).permutation(len(taken))
    requests = replace(taken.requests.take(arrival), seq=np.arange(len(taken)))
    return Workload(mix.name, requests, taken.num_output_tokens[arrival], mix.data)


def _drawn(draw: Draw, seed: np.random.SeedSequence, num_rows: int) -> Pool:
    # A generator over a fresh sequence: `spawn` of a used one would give other children.
    fresh = np.random.SeedSequence(seed.entropy, spawn_key=seed.spawn_key)
    return draw(np.random.default_rng(fresh), num_rows)


def _head(pool: Pool, num_rows: int) -> Pool:
    return Pool(pool.requests.take(np.arange(num_rows)), pool.num_output_tokens[:num_rows])


def _solve(
    mix: Mix, setting: Setting, pools: Sequence[Pool], counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Numbers of each kind for the targets, from the means of the kinds at the numbers of the last round."""
    heads = [
        _head(pool, int(count) if count > 0 else len(pool)) for pool, count in zip(pools, counts, strict=True)
    ]
    means = np.array([_means(head, setting) for head in heads])
    compute, memory, shared, prompt = means.T
    rows = [compute - mix.density * memory]
    if mix.prefix_sharing is not None:
        rows.append(shared - mix.prefix_sharing * prompt)
    rows.append(np.ones(len(pools)))
    right = np.zeros(len(rows))
    right[-1] = 1.0
    mixture = np.linalg.solve(np.array(rows), right)
    if np.any(mixture <= 0):
        raise PlanError(
            f"No mix of these kinds has density {mix.density} and sharing {mix.prefix_sharing}; "
            "choose targets between those of the kinds.",
            workload=mix.name,
        )
    # A first guess of the size comes from the means; later rounds scale the real optimum.
    if np.any(counts > 0):
        whole = concatenated(heads)
        optimum_s = workload_figures(
            whole.requests, whole.num_output_tokens, setting.model, setting.device, setting.block_size
        ).optimum_s
        size = counts.sum() * setting.hours * 3600 / optimum_s
    else:
        size = setting.hours * 3600 / float(np.maximum(mixture @ compute, mixture @ memory))
    limits = np.array([len(pool) for pool in pools])
    wanted = mixture * size
    exhausted = [
        limit / want
        for pool, limit, want, draw in zip(pools, limits, wanted, mix.draws, strict=True)
        if limit < want and _is_used_up(pool, draw)
    ]
    wanted = wanted * min(exhausted, default=1.0)
    return np.asarray(np.maximum(1, np.rint(wanted)), dtype=np.int64)


def _is_used_up(pool: Pool, draw: Draw) -> bool:
    """Whether the kind has no more requests than the pool holds."""
    return len(draw(np.random.default_rng(0), len(pool) + 1)) <= len(pool)


def _means(pool: Pool, setting: Setting) -> Floats:
    prompt, output = pool.requests.num_prompt_tokens, pool.num_output_tokens
    shared = seen_tokens(pool.requests, setting.block_size)
    return np.array(
        [
            compute_s(setting.model, setting.device, prompt, output, shared).mean(),
            memory_s(setting.model, setting.device, prompt, output).mean(),
            shared.mean(),
            prompt.mean(),
        ]
    )


def _data(traces: Path | None) -> str:
    return "real" if traces is not None else "generated"
