"""`blend bench traces`: mixes of published traces, none of whose output lengths are known beforehand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blend_core.studies.mixes import build_workload, real_mixes
from blend_core.studies.study import WorkloadRun, run_workload
from blend_core.studies.trace_lengths import data_of
from flows.bench.study_tasks import StudyRun, StudyTarget, over_seeds, run_tasks

QUICK_HOURS: Final = 0.1
"""Practical optimum of each workload with `--quick`, for an answer within minutes."""


@dataclass(frozen=True, slots=True)
class TracesTask:
    """One mix, by its place in `real_mixes`, and seed; other attributes as of `PaperTask`."""

    mix: int
    seed: int
    hours: float
    traces: Path | None
    target: StudyTarget


def run_traces_bench(
    traces: Path | None,
    seeds: Sequence[int],
    hours: float,
    tell: Callable[[str], None],
    target: StudyTarget,
) -> StudyRun:
    """Simulates every mix with every seed."""
    names = [mix.name for mix in real_mixes(traces)]
    tasks = [TracesTask(mix, seed, hours, traces, target) for seed in seeds for mix in range(len(names))]
    results = run_tasks(run_traces_task, tasks, tell, lambda task: f"{names[task.mix]}, seed {task.seed}")
    return StudyRun(
        data=data_of(traces),
        hours=hours,
        seeds=tuple(seeds),
        workloads=over_seeds(results),
    )


def run_traces_task(task: TracesTask) -> WorkloadRun:
    """Simulates one mix under every policy."""
    mix = real_mixes(task.traces)[task.mix]
    workload = build_workload(mix, task.target.setting(task.hours), task.seed)
    return run_workload(workload, task.target.model, task.target.device, task.seed)
