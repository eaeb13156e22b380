"""`blend bench ranks`: how much faster several model replicas are than one (BlendServe §5.5)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from blend_core.partition import partition, rank_positions, sub_plan
from blend_core.planner import PlanConfig, build_plan
from blend_core.simulator import simulate
from blend_core.studies.mixes import PAPER_TARGETS, build_workload, paper_mix
from blend_core.studies.replanning import SampleReplanner
from blend_core.studies.study import BLOCK_SIZE, study_limits
from flows.bench.study_tasks import run_tasks, study_model, study_setting

NUM_RANKS: Final = (2, 4, 8)
SHARDS_PER_RANK: Final = 16
POLICY: Final = "dual_scan"
QUICK_HOURS: Final = 0.5


@dataclass(frozen=True, slots=True)
class RanksTask:
    """One trace of the paper, by its place, and seed; other attributes as of `PaperTask`."""

    trace: int
    seed: int
    hours: float
    traces: Path | None


@dataclass(frozen=True, slots=True)
class RanksRun:
    """What `blend bench ranks` measured.

    Attributes:
        data: `real` or `generated` lengths.
        hours: practical optimum of a trace on one rank.
        seeds: seeds that every figure is the mean of.
        speedup: by trace: time of one rank by time of the slowest of so many ranks.
    """

    data: str
    hours: float
    seeds: tuple[int, ...]
    speedup: dict[str, dict[int, float]]

    def as_json(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        return {
            "data": self.data,
            "hours": self.hours,
            "seeds": list(self.seeds),
            "workloads": [
                {"name": name, "speedup": {str(ranks): value for ranks, value in by_ranks.items()}}
                for name, by_ranks in self.speedup.items()
            ],
        }


def run_ranks_bench(
    traces: Path | None, seeds: Sequence[int], hours: float, tell: Callable[[str], None]
) -> RanksRun:
    """Simulates the four traces, preset lengths, on 1, 2, 4 and 8 ranks with every seed."""
    tasks = [RanksTask(trace, seed, hours, traces) for seed in seeds for trace in range(len(PAPER_TARGETS))]
    results = run_tasks(
        run_ranks_task, tasks, tell, lambda task: f"{PAPER_TARGETS[task.trace][0]}, seed {task.seed}"
    )
    speedups: dict[str, dict[int, float]] = {}
    for trace, (name, _, _) in enumerate(PAPER_TARGETS):
        own = [result for task, result in zip(tasks, results, strict=True) if task.trace == trace]
        speedups[name] = {ranks: float(np.mean([one[ranks] for one in own])) for ranks in NUM_RANKS}
    return RanksRun("generated" if traces is None else "real", hours, tuple(seeds), speedups)


def run_ranks_task(task: RanksTask) -> dict[int, float]:
    """Returns the speed-up of each number of ranks. Each has a cache and samples of its own."""
    model, device = study_model()
    workload = build_workload(
        paper_mix(task.traces, *PAPER_TARGETS[task.trace]), study_setting(task.hours), task.seed
    )
    requests, limits = workload.requests, study_limits(model, device)
    config = PlanConfig(POLICY, BLOCK_SIZE, task.seed)
    plan = build_plan(requests, model, device, config)
    # The rows of a workload are its requests' numbers.
    assert (requests.seq == np.arange(len(requests))).all()

    def duration_s(positions: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
        part = sub_plan(plan, positions, model, device)
        rows = np.sort(part.seq)
        own = requests.take(rows)
        return simulate(
            own,
            workload.num_output_tokens[rows],
            part,
            POLICY,
            model,
            device,
            limits,
            overlap=True,
            feedback=SampleReplanner(own, part, model, device, config),
        ).duration_s

    alone_s = duration_s(np.arange(len(plan)))
    slowest_s = {}
    for num_ranks in NUM_RANKS:
        shards = partition(plan, num_ranks, SHARDS_PER_RANK)
        slowest_s[num_ranks] = max(duration_s(rank_positions(shards, rank)) for rank in range(num_ranks))
    return {num_ranks: alone_s / slowest for num_ranks, slowest in slowest_s.items()}
