"""`blend bench paper`: the paper's four traces under every policy, with preset and with hidden lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from blend_core.studies.mixes import PAPER_TARGETS, build_workload, paper_mix
from blend_core.studies.study import WorkloadRun, run_workload
from blend_core.studies.trace_lengths import data_of
from flows.bench.study_tasks import StudyRun, StudyTarget, interleaved, over_seeds, run_tasks

QUICK_HOURS: Final = 0.25
"""Practical optimum of each workload with `--quick`, for an answer within minutes."""


@dataclass(frozen=True, slots=True)
class PaperTask:
    """One trace and seed.

    Attributes:
        trace: place in `PAPER_TARGETS`.
        seed: of the workload, the random order and the choice of samples.
        hours: practical optimum.
        traces: folder of traces; None generates lengths.
        interleaves: whether the trace runs with its kinds interleaved as well.
        target: what is simulated.
    """

    trace: int
    seed: int
    hours: float
    traces: Path | None
    interleaves: bool
    target: StudyTarget


class PaperResult(NamedTuple):
    """One trace and seed.

    Attributes:
        preset: with lengths of the memory side known beforehand.
        hidden: with none known.
        interleaved: `preset` with its kinds interleaved, under `dfs` alone; None where not asked for.
    """

    preset: WorkloadRun
    hidden: WorkloadRun
    interleaved: WorkloadRun | None


@dataclass(frozen=True, slots=True)
class PaperRun:
    """What `blend bench paper` measured.

    Attributes:
        study: every trace in both sets.
        interleaved: the traces of the first seed with segments renamed at random, under `dfs` alone, each
            beside the same trace as it is.
    """

    study: StudyRun
    interleaved: tuple[tuple[WorkloadRun, WorkloadRun], ...]


def run_paper_bench(
    traces: Path | None,
    seeds: Sequence[int],
    hours: float,
    tell: Callable[[str], None],
    target: StudyTarget,
) -> PaperRun:
    """Simulates the four traces with every seed."""
    tasks = [
        PaperTask(trace, seed, hours, traces, interleaves=seed == seeds[0], target=target)
        for seed in seeds
        for trace in range(len(PAPER_TARGETS))
    ]
    results = run_tasks(
        run_paper_task, tasks, tell, lambda task: f"{PAPER_TARGETS[task.trace][0]}, seed {task.seed}"
    )
    whole = over_seeds([run for result in results for run in (result.preset, result.hidden)])
    return PaperRun(
        study=StudyRun(
            data=data_of(traces),
            hours=hours,
            seeds=tuple(seeds),
            workloads=tuple(sorted(whole, key=lambda run: run.length_set == "hidden")),
        ),
        interleaved=tuple(
            (result.interleaved, result.preset) for result in results if result.interleaved is not None
        ),
    )


def run_paper_task(task: PaperTask) -> PaperResult:
    """Simulates one trace: preset lengths, hidden lengths, and preset ones with kinds interleaved."""
    model, device = task.target.model, task.target.device
    trace, setting = PAPER_TARGETS[task.trace], task.target.setting(task.hours)
    workload = build_workload(paper_mix(task.traces, *trace), setting, task.seed)
    preset = run_workload(workload, model, device, task.seed)
    mixed = None
    if task.interleaves:
        mixed = run_workload(interleaved(workload, task.seed), model, device, task.seed, policies=("dfs",))
    hidden = build_workload(paper_mix(task.traces, *trace, preset=False), setting, task.seed)
    return PaperResult(preset, run_workload(hidden, model, device, task.seed, known=preset), mixed)
