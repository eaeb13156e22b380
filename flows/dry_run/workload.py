"""Requests on a target: planned and simulated under a policy, as a whole or in a part that stands for it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from blend_core.errors import PlanError
from blend_core.partition import SHARDS_PER_RANK, partition, rank_positions, sub_plan
from blend_core.performance import WorkTotals, practical_optimum_s
from blend_core.plan import Plan
from blend_core.planner import PlanConfig, plan_tree
from blend_core.prefix_tree import PrefixTree
from blend_core.request import RequestArrays, longest_kv_tokens
from blend_core.simulator import simulate
from flows.dry_run.lengths import AnswerLengths, LengthBasis
from flows.dry_run.sampling import duration_of_whole_s, sample_positions
from flows.dry_run.target import Target


@dataclass(frozen=True, slots=True)
class SimulationSize:
    """How much of a plan is simulated.

    Attributes:
        max_num_requests: a plan of at most that many requests is simulated as a whole.
        num_sampled: about as many requests of a larger plan are.
    """

    max_num_requests: int = 50_000
    num_sampled: int = 20_000


QUICK = SimulationSize(max_num_requests=5_000, num_sampled=4_000)

ENDS_BETWEEN_NOTES: Final = 500
"""Simulated answers from one word about progress to the next."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a plan takes in simulation.

    Attributes:
        duration_s: seconds from the first step to the last; of a sample, what that amounts to for the whole.
        prefix_sharing: share of prompt tokens served from the cache, of those that were simulated.
        num_preempted: preemptions of those that were simulated.
        num_simulated: requests that were simulated.
    """

    duration_s: float
    prefix_sharing: float
    num_preempted: int
    num_simulated: int


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests, their answers and what runs them.

    Attributes:
        requests: prompts and bounds, ascending in `seq`.
        tree: their prefix tree at the target's block size.
        lengths: of their answers.
        target: model, device and limits.
        overlap: whether the engine runs decode attention beside compute.
        size: how much is simulated.
        num_refused: requests that were left out, since a job refuses them.
    """

    requests: RequestArrays
    tree: PrefixTree
    lengths: AnswerLengths
    target: Target
    overlap: bool
    size: SimulationSize
    num_refused: int = 0

    def plan(self, policy: str) -> Plan:
        """Returns the plan that a job of that policy would begin with."""
        limits = self.target.limits
        config = PlanConfig(policy, limits.block_size, max_num_batched_tokens=limits.max_num_batched_tokens)
        if self.lengths.basis is LengthBasis.RECORDED:
            # With records of earlier answers there is nothing left to sample.
            config = replace(config, sample_fraction=0.0)
        return plan_tree(
            self.requests,
            self.tree,
            self.target.model,
            self.target.device,
            config,
            lengths=self.lengths.estimates,
            priors=self.lengths.priors,
        )

    def optimum_s(self) -> float:
        """Returns the practical optimum at the lengths that a simulation finds."""
        return practical_optimum_s(
            self.target.model,
            self.target.device,
            self.tree.num_prompt_tokens,
            self.tree.num_shared_tokens,
            self.lengths.actual[self.tree.leaf_row],
            max_num_batched_tokens=self.target.limits.max_num_batched_tokens,
        )

    def simulate(self, plan: Plan, on_progress: Callable[[str], None]) -> Simulated:
        """Simulates a plan of these requests, or of some of them; of a large one a sample.

        `on_progress` hears every now and then how far it is.
        """
        target, num_requests = self.target, len(plan)
        is_sample = num_requests > self.size.max_num_requests
        part = self._part(plan, self._sample(plan)) if is_sample else plan
        rows = np.sort(np.searchsorted(self.requests.seq, part.seq))
        result = simulate(
            self.requests.take(rows),
            self.lengths.actual[rows],
            part,
            part.policy,
            target.model,
            target.device,
            target.limits,
            overlap=self.overlap,
            feedback=_Progress(len(part), on_progress),
        )
        duration_s = result.duration_s
        if is_sample:
            duration_s = duration_of_whole_s(
                result, target, _work_s(plan) / _work_s(part), self._min_num_steps(plan), overlap=self.overlap
            )
        return Simulated(
            duration_s=duration_s,
            prefix_sharing=result.prefix_sharing,
            num_preempted=result.num_preempted,
            num_simulated=len(part),
        )

    def simulate_replicas(
        self, plan: Plan, num_replicas: int, on_progress: Callable[[str], None]
    ) -> Simulated:
        """Simulates the slowest of several replicas that share the plan.

        All are planned the same work. Of a large plan only those are simulated that may end last: the one
        that ideal overlap would keep longest at the lengths that a simulation finds, and the one with the
        longest answer.
        """
        shards = partition(plan, num_replicas, SHARDS_PER_RANK)
        parts = [
            self._part(plan, positions)
            for rank in range(num_replicas)
            if len(positions := rank_positions(shards, rank))
        ]
        if len(plan) > self.size.num_sampled:
            optima_s = [self._optimum_s(part) for part in parts]
            longest = [int(self._actual(part).max()) for part in parts]
            latest = {optima_s.index(max(optima_s)), longest.index(max(longest))}
            parts = [parts[rank] for rank in sorted(latest)]
        return max(
            (self.simulate(part, on_progress) for part in parts), key=lambda simulated: simulated.duration_s
        )

    def _sample(self, plan: Plan) -> npt.NDArray[np.int64]:
        """Returns places of a sample, rising; the longest answer is in it, since it may decide by itself."""
        return np.union1d(sample_positions(plan, self.size.num_sampled), [self._actual(plan).argmax()])

    def _actual(self, plan: Plan) -> npt.NDArray[np.int64]:
        """Returns `(num_requests,)` tokens of each answer in the plan's order."""
        return self.lengths.actual[np.searchsorted(self.requests.seq, plan.seq)]

    def _optimum_s(self, plan: Plan) -> float:
        target = self.target
        return practical_optimum_s(
            target.model,
            target.device,
            plan.num_prompt_tokens,
            plan.num_shared_tokens,
            self._actual(plan),
            max_num_batched_tokens=target.limits.max_num_batched_tokens,
        )

    def _min_num_steps(self, plan: Plan) -> float:
        """Returns the steps of the optimum, or more where no more requests at once may decode."""
        target, actual = self.target, self._actual(plan)
        totals = WorkTotals.of(plan.num_prompt_tokens, plan.num_shared_tokens, actual)
        num_steps = totals.num_steps(target.model, target.device, target.limits.max_num_batched_tokens)
        return max(num_steps, float(actual.sum()) / target.limits.max_num_seqs)

    def _part(self, plan: Plan, positions: npt.NDArray[np.int64]) -> Plan:
        target = self.target
        return sub_plan(plan, positions, target.model, target.device, target.limits.max_num_batched_tokens)


class _Progress:
    """Watches a simulated run and says how far it is; the plan stays as it is."""

    __slots__ = ("_num_ended", "_num_requests", "_tell")

    def __init__(self, num_requests: int, tell: Callable[[str], None]) -> None:
        self._num_ended = 0
        self._num_requests = num_requests
        self._tell = tell

    def ended(self, seq: int, num_output_tokens: int) -> None:
        self._num_ended += 1
        if self._num_ended % ENDS_BETWEEN_NOTES == 0:
            self._tell(f"{self._num_ended:,} of {self._num_requests:,} requests simulated")

    def revision(self) -> None:
        return None


def requests_that_fit(requests: RequestArrays, target: Target) -> RequestArrays:
    """Returns the requests that KV holds with their longest answer; a job refuses the others.

    Raises:
        PlanError: no request fits.
    """
    needed = longest_kv_tokens(requests.num_prompt_tokens, requests.max_tokens, target.model.max_model_len)
    fits = needed <= target.limits.num_blocks * target.limits.block_size
    if fits.all():
        return requests
    if not fits.any():
        raise PlanError(
            f"Every request needs more KV than {target.device.name} has; lower max_tokens, or name a larger "
            "device."
        )
    return requests.take(np.flatnonzero(fits))


def _work_s(plan: Plan) -> float:
    return float(plan.compute_s.sum() + plan.memory_s.sum())
