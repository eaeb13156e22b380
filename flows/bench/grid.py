"""`blend bench grid`: the paper's 65 workloads, memory- to compute-intensive, of little to much sharing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from blend_core.studies.mixes import build_workload, grid_targets, paper_mix
from blend_core.studies.study import WorkloadRun, run_workload, speedup
from blend_core.studies.trace_lengths import data_of
from flows.bench.study_tasks import StudyRun, StudyTarget, over_seeds, run_tasks

QUICK_HOURS: Final = 0.25
"""Practical optimum of each workload with `--quick`, for an answer within minutes."""
QUICK_STRIDE: Final = 16
"""Every so manieth workload of the grid with `--quick`."""


@dataclass(frozen=True, slots=True)
class GridTask:
    """One workload and seed; attributes as of `PaperTask`, `place` is name, density and sharing."""

    place: tuple[str, float, float]
    seed: int
    hours: float
    traces: Path | None
    target: StudyTarget


def run_grid_bench(
    traces: Path | None,
    seeds: Sequence[int],
    hours: float,
    tell: Callable[[str], None],
    target: StudyTarget,
    *,
    stride: int = 1,
) -> StudyRun:
    """Simulates every `stride`-th workload of the grid with every seed; video lengths are preset."""
    tasks = [
        GridTask(place, seed, hours, traces, target) for seed in seeds for place in grid_targets()[::stride]
    ]
    results = run_tasks(run_grid_task, tasks, tell, lambda task: f"{task.place[0]}, seed {task.seed}")
    return StudyRun(
        data=data_of(traces),
        hours=hours,
        seeds=tuple(seeds),
        workloads=over_seeds(results),
    )


GRID_RATIOS: Final = (
    "dual_scan_over_dfs",
    "dual_scan_over_random",
    "density_matched_over_dfs",
    "density_matched_over_dual_scan",
)
"""Speed-ups that the grid is summed up by."""


def run_grid_task(task: GridTask) -> WorkloadRun:
    """Simulates one workload under every policy."""
    mix = paper_mix(task.traces, *task.place)
    workload = build_workload(mix, task.target.setting(task.hours), task.seed)
    return run_workload(workload, task.target.model, task.target.device, task.seed)


def grid_summary(study: StudyRun) -> dict[str, Any]:
    """Returns what the grid comes to: speed-ups and the worst figures of a policy."""

    def extremes(name: str, over: str) -> dict[str, float]:
        ratios = [speedup(run.policies, name, over) for run in study.workloads]
        return {"min": min(ratios), "mean": float(np.mean(ratios)), "max": max(ratios)}

    def of_all(name: str) -> dict[str, float]:
        runs = [run.policies[name] for run in study.workloads]
        return {
            "fraction_of_optimum_mean": float(np.mean([run.fraction_of_optimum for run in runs])),
            "fraction_of_optimum_min": min(run.fraction_of_optimum for run in runs),
            "sharing_kept_min": min(run.sharing_kept for run in runs),
        }

    return {
        "data": study.data,
        "hours": study.hours,
        "seeds": list(study.seeds),
        "num_workloads": len(study.workloads),
        **{ratio: extremes(*ratio.split("_over_")) for ratio in GRID_RATIOS},
        **of_all("dual_scan"),
        "density_matched": of_all("density_matched"),
    }
