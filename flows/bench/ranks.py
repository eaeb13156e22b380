"""`blend bench ranks`: how much faster several model replicas are than one (BlendServe §5.5)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from blend_core.partition import SHARDS_PER_RANK, partition, rank_positions, sub_plan
from blend_core.performance import MAX_NUM_BATCHED_TOKENS
from blend_core.plan import Plan
from blend_core.planner import LENGTH_AWARE_POLICIES, PlanConfig, build_plan
from blend_core.simulator import simulate
from blend_core.studies.mixes import PAPER_TARGETS, build_workload, paper_mix
from blend_core.studies.study import BLOCK_SIZE, study_limits
from blend_core.studies.trace_lengths import data_of
from flows.bench.study_tasks import StudyTarget, run_tasks

NUM_RANKS: Final = (2, 4, 8)
QUICK_HOURS: Final = 0.5
"""Practical optimum of each trace with `--quick`: more than in other studies, since eight ranks share it."""


@dataclass(frozen=True, slots=True)
class RanksTask:
    """One trace of the paper, by its place, under a length-aware policy; the rest as of `PaperTask`."""

    trace: int
    policy: str
    seed: int
    hours: float
    traces: Path | None
    target: StudyTarget


@dataclass(frozen=True, slots=True)
class RanksRun:
    """What `blend bench ranks` measured.

    Attributes:
        data: `real` or `generated` lengths.
        hours: practical optimum of a trace on one rank.
        seeds: seeds that every figure is the mean of.
        speedup: by policy and trace: time of one rank by time of the slowest of so many ranks.
    """

    data: str
    hours: float
    seeds: tuple[int, ...]
    speedup: dict[str, dict[str, dict[int, float]]]

    def as_json(self) -> dict[str, Any]:
        """Returns what `--json` prints: under `speedup` those of `dual_scan`, as the paper's."""
        return {
            "data": self.data,
            "seeds": list(self.seeds),
            "workloads": [
                {
                    "name": name,
                    "speedup": _by_text(by_ranks),
                    "density_matched": {"speedup": _by_text(self.speedup["density_matched"][name])},
                }
                for name, by_ranks in self.speedup["dual_scan"].items()
            ],
        }


def run_ranks_bench(
    traces: Path | None,
    seeds: Sequence[int],
    hours: float,
    tell: Callable[[str], None],
    target: StudyTarget,
) -> RanksRun:
    """Simulates the four traces, preset lengths, on 1, 2, 4 and 8 ranks with every seed."""
    tasks = [
        RanksTask(trace, policy, seed, hours, traces, target)
        for seed in seeds
        for trace in range(len(PAPER_TARGETS))
        for policy in LENGTH_AWARE_POLICIES
    ]
    results = run_tasks(run_ranks_task, tasks, tell, _name)
    speedups: dict[str, dict[str, dict[int, float]]] = {policy: {} for policy in LENGTH_AWARE_POLICIES}
    for place, (name, _, _) in enumerate(PAPER_TARGETS):
        for policy, by_trace in speedups.items():
            own = [
                result
                for task, result in zip(tasks, results, strict=True)
                if (task.trace, task.policy) == (place, policy)
            ]
            by_trace[name] = {ranks: float(np.mean([one[ranks] for one in own])) for ranks in NUM_RANKS}
    return RanksRun(data_of(traces), hours, tuple(seeds), speedups)


def run_ranks_task(task: RanksTask) -> dict[int, float]:
    """Returns the speed-up of each number of ranks, of which each has a cache of its own.

    The samples run first, evenly spread over the ranks; then the rest is planned and shared out.
    """
    study = _RanksStudy(task)
    alone_s = study.duration_s(1)
    return {num_ranks: alone_s / study.duration_s(num_ranks) for num_ranks in NUM_RANKS}


class _RanksStudy:
    """One workload: its samples, and the plan of the rest that rests on them."""

    __slots__ = ("_first", "_rest", "_target", "_workload")

    def __init__(self, task: RanksTask) -> None:
        self._target = task.target
        model, device = task.target.model, task.target.device
        self._workload = build_workload(
            paper_mix(task.traces, *PAPER_TARGETS[task.trace]), task.target.setting(task.hours), task.seed
        )
        requests, lengths = self._workload.requests, self._workload.num_output_tokens
        # The rows of a workload are its requests' numbers.
        assert (requests.seq == np.arange(len(requests))).all()
        config = PlanConfig(task.policy, BLOCK_SIZE, task.seed)
        self._first = build_plan(requests, model, device, config)
        samples = {seq: int(lengths[seq]) for seq in self._first.seq[self._first.lead].tolist()}
        self._rest = build_plan(requests, model, device, config, samples, 1) if samples else self._first

    def duration_s(self, num_ranks: int) -> float:
        """Seconds until the slowest rank has run its share."""
        shards = partition(self._rest, num_ranks, SHARDS_PER_RANK)
        rest_s = max(self._run(self._rest, rank_positions(shards, rank)) for rank in range(num_ranks))
        if self._rest is self._first:
            return rest_s
        samples = np.flatnonzero(self._first.lead)
        return rest_s + max(self._run(self._first, samples[rank::num_ranks]) for rank in range(num_ranks))

    def _run(self, plan: Plan, positions: npt.NDArray[np.int64]) -> float:
        if len(positions) == 0:
            return 0.0
        model, device = self._target.model, self._target.device
        part = sub_plan(plan, positions, model, device, MAX_NUM_BATCHED_TOKENS)
        rows = np.sort(part.seq)
        return simulate(
            self._workload.requests.take(rows),
            self._workload.num_output_tokens[rows],
            part,
            part.policy,
            model,
            device,
            study_limits(model, device),
            overlap=True,
        ).duration_s


def _name(task: RanksTask) -> str:
    return f"{PAPER_TARGETS[task.trace][0]} {task.policy}, seed {task.seed}"


def _by_text(by_ranks: dict[int, float]) -> dict[str, float]:
    return {str(ranks): value for ranks, value in by_ranks.items()}
