"""`blend bench ablation`: what each idea of density-matched admission is worth."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from blend_core.performance import StepTimeModel
from blend_core.studies.ablation import VARIANTS, run_variant
from blend_core.studies.mixes import PAPER_TARGETS, build_workload, paper_mix
from blend_core.studies.run_ends import RunEnds, least_start_s, run_ends
from blend_core.studies.study import BLOCK_SIZE, study_limits
from blend_core.studies.trace_lengths import data_of
from blend_core.studies.workload import workload_figures
from flows.bench.study_tasks import StudyTarget, run_tasks

QUICK_HOURS: Final = 0.1
"""Practical optimum of each workload with `--quick`, for an answer within minutes."""

ENDS_OF: Final = ("dfs", "dual_scan", "density_matched")
"""Variants whose start and end are told."""


@dataclass(frozen=True, slots=True)
class AblationTask:
    """One of the paper's traces, by its place in `PAPER_TARGETS`; other attributes as of `PaperTask`."""

    trace: int
    preset: bool
    seed: int
    hours: float
    traces: Path | None
    target: StudyTarget


class AblationResult(NamedTuple):
    """What one workload came to.

    Attributes:
        fractions: of the practical optimum, by variant.
        ends: of those in `ENDS_OF`, by variant.
        least_start_s: what no start is shorter than.
    """

    fractions: dict[str, float]
    ends: dict[str, RunEnds]
    least_start_s: float


@dataclass(frozen=True, slots=True)
class AblationRun:
    """What the variants came to.

    Attributes:
        data: `real` where lengths come from published traces, else `generated`.
        hours: practical optimum of each workload.
        seeds: seeds that every figure is the mean of.
        fractions: by variant and set (`preset`, `hidden`): of the practical optimum, mean and worst workload.
        ends: of some variants, by set: mean start and end.
        least_start_s: what no start is shorter than, whatever the workload.
    """

    data: str
    hours: float
    seeds: tuple[int, ...]
    fractions: dict[str, dict[str, tuple[float, float]]]
    ends: dict[str, dict[str, RunEnds]]
    least_start_s: float

    def as_json(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        return {
            "data": self.data,
            "hours": self.hours,
            "seeds": list(self.seeds),
            "variants": {
                name: {
                    length_set: {"fraction_of_optimum_mean": mean, "fraction_of_optimum_min": worst}
                    for length_set, (mean, worst) in by_set.items()
                }
                for name, by_set in self.fractions.items()
            },
            "least_start_s": self.least_start_s,
            "ends": {
                name: {length_set: asdict(ends) for length_set, ends in by_set.items()}
                for name, by_set in self.ends.items()
            },
        }


def run_ablation_bench(
    traces: Path | None,
    seeds: Sequence[int],
    hours: float,
    tell: Callable[[str], None],
    target: StudyTarget,
) -> AblationRun:
    """Simulates the paper's traces, preset and hidden, under every variant and with every seed."""
    tasks = [
        AblationTask(trace, preset, seed, hours, traces, target)
        for seed in seeds
        for trace in range(len(PAPER_TARGETS))
        for preset in (True, False)
    ]
    results = run_tasks(run_ablation_task, tasks, tell, _name)
    by_set = {
        length_set: [result for task, result in zip(tasks, results, strict=True) if task.preset is preset]
        for length_set, preset in (("preset", True), ("hidden", False))
    }
    return AblationRun(
        data=data_of(traces),
        hours=hours,
        seeds=tuple(seeds),
        fractions={
            name: {
                length_set: _mean_and_worst([result.fractions[name] for result in own])
                for length_set, own in by_set.items()
            }
            for name in VARIANTS
        },
        ends={
            name: {
                length_set: _mean_ends([result.ends[name] for result in own])
                for length_set, own in by_set.items()
            }
            for name in ENDS_OF
        },
        least_start_s=min(result.least_start_s for result in results),
    )


def run_ablation_task(task: AblationTask) -> AblationResult:
    """Simulates one workload under every variant."""
    model, device = task.target.model, task.target.device
    mix = paper_mix(task.traces, *PAPER_TARGETS[task.trace], preset=task.preset)
    workload = build_workload(mix, task.target.setting(task.hours), task.seed)
    optimum_s = workload_figures(
        workload.requests, workload.num_output_tokens, model, device, BLOCK_SIZE
    ).optimum_s
    fractions: dict[str, float] = {}
    ends: dict[str, RunEnds] = {}
    for name in VARIANTS:
        result = run_variant(workload, model, device, name, task.seed)
        fractions[name] = optimum_s / result.duration_s
        if name in ENDS_OF:
            ends[name] = run_ends(result.windows)
    longest_prompt = int(workload.requests.num_prompt_tokens.max())
    least = least_start_s(StepTimeModel.of(model, device), study_limits(model, device), longest_prompt)
    return AblationResult(fractions, ends, least)


def _mean_and_worst(fractions: Sequence[float]) -> tuple[float, float]:
    return float(np.mean(fractions)), min(fractions)


def _mean_ends(ends: Sequence[RunEnds]) -> RunEnds:
    return RunEnds(float(np.mean([one.start_s for one in ends])), float(np.mean([one.end_s for one in ends])))


def _name(task: AblationTask) -> str:
    length_set = "preset" if task.preset else "hidden"
    return f"{PAPER_TARGETS[task.trace][0]} {length_set}, seed {task.seed}"
