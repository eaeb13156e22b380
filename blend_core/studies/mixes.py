"""The mixes of the studies: how many requests of each kind give a density, a sharing and a length.

Kinds and targets follow BlendServe §6.1; densities are at peak figures, with shared segments once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from blend_core.errors import PlanError
from blend_core.performance import StepCost, WorkTotals, num_kv_blocks, optimum_of_totals_s, step_cost
from blend_core.specs import DeviceProfile, ModelSpec
from blend_core.studies import trace_lengths
from blend_core.studies.pools import (
    Draw,
    Pool,
    alternating,
    block_trace,
    concatenated,
    cut_to_kv,
    few_shot,
    generated,
    resampled,
)
from blend_core.studies.workload import Workload, seen_tokens

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_PILOT_ROWS: Final = 4_000
"""Requests of each kind whose means give the first numbers."""

_MAX_ROUNDS: Final = 60
"""Corrections of the numbers at most; the best numbers found are taken then."""

_WHOLE_STEPS: Final = 6
"""Corrections in full, before half ones."""

_TOLERANCE: Final = 1e-3
"""Share by which a mix may miss a target."""

_SPARE_ROWS_SHARE: Final = 0.2
"""Rows drawn beyond those asked for, so that a small correction needs no other draw."""

_SHARED, _PROMPT = 4, 5
"""Places of the last two sums of a kind; those before are the first fields of `WorkTotals`."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Kinds of requests and what their mix must amount to.

    Attributes:
        name: the workload's name in tables.
        draws: one per kind.
        density: compute density of the whole, at peak figures.
        prefix_sharing: share of prompt tokens that are shared; None where the kinds decide.
        data: as of `trace_lengths.data_of`.
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

    @property
    def num_kv_tokens(self) -> int:
        """KV of the device in tokens."""
        num_blocks = num_kv_blocks(self.model, self.device.kv_capacity_bytes, self.block_size)
        return num_blocks * self.block_size


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
    return Mix(name, draws, density, prefix_sharing, trace_lengths.data_of(traces))


PAPER_TARGETS: Final = (
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


def real_mixes(traces: Path | None) -> list[Mix]:
    """Mixes of published traces at density 1.0, no length preset.

    Without traces lengths are generated, and the mix with Mooncake's block ids is left out.
    """
    r1 = resampled(trace_lengths.deepseek_r1(traces))
    azure = resampled(trace_lengths.azure_code(traces))
    mmlu = trace_lengths.mmlu_5shot(traces)
    chat = alternating([resampled(trace_lengths.sharegpt(traces)), resampled(trace_lengths.gsm8k(traces))])
    kinds: dict[str, tuple[Draw, ...]] = {
        "mmlu+r1": (few_shot(mmlu, np.array([2])), r1),
        "azure+r1": (azure, r1),
        "sharegpt+gsm8k+r1": (chat, r1),
        "lmsys+r1": (resampled(trace_lengths.lmsys(traces)), r1),
        "wildbench+azure": (few_shot(mmlu, trace_lengths.wildbench_outputs(traces)), azure),
    }
    if traces is not None:
        kinds["mooncake+r1"] = (block_trace(trace_lengths.mooncake_conversation(traces)), r1)
    return [Mix(name, draws, 1.0, None, trace_lengths.data_of(traces)) for name, draws in kinds.items()]


def build_workload(mix: Mix, setting: Setting, seed: int) -> Workload:
    """Draws the requests of a mix; the same seed gives the same workload.

    A kind that has fewer requests than the mix asks for is used up, and the others are cut to keep the
    density. Answers end where KV does, so that every request can run.

    Raises:
        PlanError: no numbers of these kinds reach the density and the sharing.
    """
    children = np.random.SeedSequence(seed).spawn(len(mix.draws) + 1)
    kinds = [_Kind(draw, child, setting) for draw, child in zip(mix.draws, children, strict=False)]
    counts = _first_counts(mix, setting, kinds)
    best, least_miss = counts, np.inf
    for num_rounds in range(_MAX_ROUNDS):
        wanted = _next_counts(mix, setting, kinds, counts)
        # Whole steps first, then half ones, since a heavy kind's mean moves with its number.
        step = 1.0 if num_rounds < _WHOLE_STEPS else 0.5
        counts = np.maximum(1, np.rint(counts + step * (wanted - counts))).astype(np.int64)
        for kind, count in zip(kinds, counts.tolist(), strict=True):
            kind.hold(count)
        counts = np.minimum(counts, [kind.num_rows for kind in kinds])
        miss = _miss(mix, setting, kinds, counts)
        if miss < least_miss:
            best, least_miss = counts, miss
        if miss <= _TOLERANCE:
            break
    taken = concatenated([kind.head(count) for kind, count in zip(kinds, best.tolist(), strict=True)])
    # Arrival order: the kinds thoroughly mixed, as requests of a night lie in their table.
    arrival = np.random.default_rng(children[-1]).permutation(len(taken))
    requests = replace(taken.requests.take(arrival), seq=np.arange(len(taken)))
    return Workload(mix.name, requests, taken.num_output_tokens[arrival], mix.data)


class _Kind:
    """One kind of a mix: its pool, drawn as far as it was needed, and what any head of it amounts to.

    Kinds share no prefix, so sums of a mix are those of its kinds; and a row's shared tokens depend on
    earlier rows only, so that a head's sums are read off running ones.
    """

    __slots__ = (
        "_block_size",
        "_draw",
        "_longest",
        "_num_kv_tokens",
        "_pool",
        "_seed",
        "_sums",
        "is_used_up",
    )

    def __init__(self, draw: Draw, seed: np.random.SeedSequence, setting: Setting) -> None:
        self._draw = draw
        self._seed = seed
        self._block_size = setting.block_size
        self._num_kv_tokens = setting.num_kv_tokens
        self.is_used_up = False
        self._take(_PILOT_ROWS)

    @property
    def num_rows(self) -> int:
        """Rows that are drawn."""
        return len(self._pool)

    def hold(self, num_rows: int) -> None:
        """Draws more rows where there are fewer and the kind has more."""
        if num_rows > len(self._pool) and not self.is_used_up:
            self._take(int(num_rows * (1.0 + _SPARE_ROWS_SHARE)))

    def head(self, num_rows: int) -> Pool:
        """Returns the first rows."""
        return Pool(self._pool.requests.head(num_rows), self._pool.num_output_tokens[:num_rows])

    def sums(self, num_rows: int) -> Floats:
        """Returns sums over the first rows: the first fields of `WorkTotals`, shared and prompt tokens."""
        summed: Floats = self._sums[num_rows]
        return summed

    def longest(self, num_rows: int) -> float:
        """Returns the longest answer of the first rows."""
        return float(self._longest[num_rows - 1])

    def _take(self, num_rows: int) -> None:
        # A generator over a fresh sequence: `spawn` of a used one would give other children.
        fresh = np.random.SeedSequence(self._seed.entropy, spawn_key=self._seed.spawn_key)
        drawn = self._draw(np.random.default_rng(fresh), num_rows)
        self._pool = cut_to_kv(drawn, self._num_kv_tokens)
        self.is_used_up = len(self._pool) < num_rows
        prompt = self._pool.requests.num_prompt_tokens.astype(np.float64)
        output = self._pool.num_output_tokens.astype(np.float64)
        shared = seen_tokens(self._pool.requests, self._block_size).astype(np.float64)
        growth = output * output / 2.0
        columns = (
            prompt - shared + output,
            prompt * prompt - shared * shared,
            prompt * output + growth,
            (prompt - shared) * output + growth,
            shared,
            prompt,
        )
        self._sums = np.zeros((len(prompt) + 1, len(columns)))
        for index, column in enumerate(columns):
            np.cumsum(column, out=self._sums[1:, index])
        self._longest = np.maximum.accumulate(output)


def _first_counts(mix: Mix, setting: Setting, kinds: Sequence[_Kind]) -> Ints:
    """Numbers of each kind by the means of their pilots."""
    means = np.array([kind.sums(kind.num_rows) / kind.num_rows for kind in kinds])
    mixture = _mixture(mix, setting, means)
    cost = _cost(setting, mixture @ means)
    size = setting.hours * 3600 / max(cost.compute_s, cost.memory_s)
    return np.asarray(np.clip(np.rint(mixture * size), 1, [kind.num_rows for kind in kinds]), dtype=np.int64)


def _next_counts(mix: Mix, setting: Setting, kinds: Sequence[_Kind], counts: Ints) -> Floats:
    """Numbers of each kind for the targets, from the means of the kinds at their present numbers."""
    means = np.array([kind.sums(count) / count for kind, count in zip(kinds, counts.tolist(), strict=True)])
    mixture = _mixture(mix, setting, means)
    wanted = mixture * counts.sum() * setting.hours * 3600 / _optimum_s(setting, kinds, counts)
    shares = [
        kind.num_rows / want
        for kind, want in zip(kinds, wanted.tolist(), strict=True)
        if kind.is_used_up and kind.num_rows < want
    ]
    return np.asarray(wanted * min(shares, default=1.0), dtype=np.float64)


def _mixture(mix: Mix, setting: Setting, means: Floats) -> Floats:
    """Share of each kind in the requests, so that density and sharing are met."""
    costs = [_cost(setting, row) for row in means]
    rows = [np.array([cost.compute_s - mix.density * cost.memory_s for cost in costs])]
    if mix.prefix_sharing is not None:
        rows.append(means[:, _SHARED] - mix.prefix_sharing * means[:, _PROMPT])
    rows.append(np.ones(len(costs)))
    right = np.zeros(len(rows))
    right[-1] = 1.0
    mixture = np.linalg.solve(np.array(rows), right)
    if np.any(mixture <= 0):
        raise PlanError(
            f"No numbers of its kinds give {mix.name} density {mix.density} and the sharing asked for; "
            "choose more hours, or targets between those of the kinds.",
            workload=mix.name,
        )
    return mixture


def _miss(mix: Mix, setting: Setting, kinds: Sequence[_Kind], counts: Ints) -> float:
    """Largest share by which the numbers miss a target; the length does not count where a kind is used up."""
    sums = _sums(kinds, counts)
    cost = _cost(setting, sums)
    misses = [cost.compute_s / cost.memory_s / mix.density - 1]
    if mix.prefix_sharing is not None:
        misses.append(sums[_SHARED] / sums[_PROMPT] / mix.prefix_sharing - 1)
    is_cut = [
        kind.is_used_up and count == kind.num_rows for kind, count in zip(kinds, counts.tolist(), strict=True)
    ]
    if not any(is_cut):
        misses.append(_optimum_s(setting, kinds, counts) / (setting.hours * 3600) - 1)
    return float(np.abs(misses).max())


def _sums(kinds: Sequence[_Kind], counts: Ints) -> Floats:
    return np.asarray(sum(kind.sums(count) for kind, count in zip(kinds, counts.tolist(), strict=True)))


def _cost(setting: Setting, sums: Floats) -> StepCost:
    num_tokens, prefill_tokens_sq, decode_kv_tokens = sums[:3].tolist()
    return step_cost(setting.model, setting.device, num_tokens, prefill_tokens_sq, decode_kv_tokens)


def _optimum_s(setting: Setting, kinds: Sequence[_Kind], counts: Ints) -> float:
    longest = max(kind.longest(count) for kind, count in zip(kinds, counts.tolist(), strict=True))
    num_tokens, prefill_tokens_sq, decode_kv_tokens, held_kv_tokens = _sums(kinds, counts)[:4].tolist()
    totals = WorkTotals(num_tokens, prefill_tokens_sq, decode_kv_tokens, held_kv_tokens, longest)
    return optimum_of_totals_s(setting.model, setting.device, totals)
