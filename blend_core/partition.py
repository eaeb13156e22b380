"""Shares a plan out among ranks, in shards that each have the plan's density (BlendServe §5.5).

The plan falls in density from left to right, and the cut is the same scan as in a run: from both ends
inwards, so that what has been taken at any time has the density of the whole. A shard is closed when it holds
its share of the work: a piece from the left and a piece from the right. Each cut parts one path from the root
at most, and moves to where less sharing is lost, though never by more than `CUT_SLACK` of a shard's work. So
a prefix group stays together unless it is larger than a shard, when it would make one rank late.

Shards are dealt out in rounds of one for each rank. The first ones hold the longest answers: a rank that got
them all would end last, in simulation by up to half of its time, though its work is the same. They differ
most as well, since one long answer can be a third of a shard's KV reading. So in each round a rank gets the
shard that best makes up for what it has too much or too little of, compute and memory apart; the small
requests of the last rounds then even out what is left. Whoever leases shards on demand takes them by `index`.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import numba
import numpy as np
import numpy.typing as npt

from blend_core.errors import PlanError
from blend_core.performance import compute_density, compute_s, memory_s, practical_optimum_s
from blend_core.plan import Plan, frozen
from blend_core.specs import DeviceProfile, ModelSpec

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SHARDS_PER_RANK: Final = 16
"""Of a rank in runs, forecasts and studies: enough to deal evenly, small enough to be moved at the end."""

CUT_SLACK: Final = 0.01
"""Share of a shard's work by which a cut may move to keep a prefix group together."""

NUM_DEALS: Final = 4
"""Times that every round is dealt; the second one brings most of what the first one leaves."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A piece of a plan for one rank.

    Attributes:
        rank: model replica that it is meant for, from 0.
        index: number among all shards of the plan, from 0; from the ends of the plan inwards.
        positions: `(num_requests,)` int64 places in the plan, rising: the left piece, then the right one.
    """

    rank: int
    index: int
    positions: Ints

    def __len__(self) -> int:
        return len(self.positions)


def partition(plan: Plan, num_ranks: int, shards_per_rank: int) -> list[Shard]:
    """Cuts a plan into `num_ranks * shards_per_rank` shards of equal work. Does not mutate; deterministic.

    Every request is in one shard. The work (`compute_s + memory_s`) of a shard is off its equal share by at
    most `4 * CUT_SLACK` of it and the work of four requests. Where the plan falls in density the same holds
    for `compute_s` and `memory_s` alone. Shards of a plan with few requests may be empty.

    Raises:
        PlanError: there is no rank, or no shard for one.
    """
    if num_ranks < 1 or shards_per_rank < 1:
        raise PlanError("A plan is cut for at least one rank into at least one shard each; ask for those.")
    num_shards = num_ranks * shards_per_rank
    lefts, rights = _scan(plan.compute_s, plan.memory_s, num_shards)
    done = np.concatenate((np.zeros(1), np.cumsum(plan.compute_s + plan.memory_s)))
    slack_s = CUT_SLACK * float(done[-1]) / num_shards
    lefts = np.maximum.accumulate(_cheapest(lefts, done, plan.num_shared_tokens, slack_s))
    rights = np.minimum.accumulate(_cheapest(rights, done, plan.num_shared_tokens, slack_s))
    # Moved cuts may not pass one another, and what they leave in the middle is the last shard's.
    rights = np.maximum(rights, lefts.max(initial=0))
    middle = rights.min(initial=len(plan))
    lefts = np.concatenate(([0], lefts, [middle]))
    rights = np.concatenate(([len(plan)], rights, [middle]))
    pieces = [
        np.concatenate(
            (np.arange(lefts[index], lefts[index + 1]), np.arange(rights[index + 1], rights[index]))
        )
        for index in range(num_shards)
    ]
    ranks = _dealt(plan, pieces, num_ranks)
    return [Shard(rank, index, piece) for index, (rank, piece) in enumerate(zip(ranks, pieces, strict=True))]


def _dealt(plan: Plan, pieces: list[Ints], num_ranks: int) -> list[int]:
    """Returns the rank of each piece: in each round the most uneven one first, each to where it evens most.

    What a rank has and what a piece holds is measured by its distance from an equal share of the plan's
    compute and of its memory. The sum of squares of the ranks' distances then falls most where the two
    distances point away from one another. Rounds are dealt again, each beside what all the others gave.
    """
    work = np.stack((plan.compute_s, plan.memory_s))
    total = work.sum(axis=1, keepdims=True)
    shares = np.divide(work, total, out=np.zeros_like(work), where=total > 0)
    held = np.array([shares[:, piece].sum(axis=1) for piece in pieces])
    excess = held - held.mean(axis=0)
    unevenness = np.square(excess).sum(axis=1)
    rank_excess = np.zeros((num_ranks, 2))
    ranks = np.zeros(len(pieces), dtype=np.int64)
    for num_passes, start in product(range(NUM_DEALS), range(0, len(pieces), num_ranks)):
        dealt = slice(start, start + num_ranks)
        if num_passes > 0:
            rank_excess[ranks[dealt]] -= excess[dealt]
        is_served = np.zeros(num_ranks, dtype=np.bool_)
        for index in (start + np.argsort(-unevenness[dealt], kind="stable")).tolist():
            rank = int(np.argmin(np.where(is_served, np.inf, rank_excess @ excess[index])))
            is_served[rank] = True
            rank_excess[rank] += excess[index]
            ranks[index] = rank
    dealt_to: list[int] = ranks.tolist()
    return dealt_to


def rank_positions(shards: list[Shard], rank: int) -> Ints:
    """Returns the places in the plan of all that a rank is meant to run, rising."""
    return np.sort(
        np.concatenate([np.empty(0, dtype=np.int64), *(s.positions for s in shards if s.rank == rank)])
    )


def sub_plan(
    plan: Plan,
    positions: Ints,
    model: ModelSpec,
    device: DeviceProfile,
    max_num_batched_tokens: int,
) -> Plan:
    """Returns the plan of some of a plan's requests, in the order of the plan. Does not mutate.

    What a request shares with one that is not in front of it any more is counted as lost, which is what a
    rank with a cache of its own finds. The best sharing is not known from a plan, so it equals the planned
    one. Nothing of it is simulated.

    Args:
        plan: the whole plan.
        positions: places in it, rising.
        model: the model that the plan was made for.
        device: the device that the plan was made for.
        max_num_batched_tokens: tokens of one step at most, as the plan was made with.

    Raises:
        PlanError: no position is named.
    """
    if len(positions) == 0:
        raise PlanError("A part of a plan holds at least one request; leave empty shards out.")
    follows = np.diff(positions, prepend=-2) == 1
    shared = np.where(follows, plan.num_shared_tokens[positions], 0).astype(np.int32)
    prompt = plan.num_prompt_tokens[positions]
    mean, second_moment = plan.estimated_output_tokens[positions], plan.estimated_output_tokens_sq[positions]
    compute = np.where(follows, plan.compute_s[positions], compute_s(model, device, prompt, mean, shared))
    spread_memory_s = float(memory_s(model, device, prompt, mean, second_moment).sum())
    num_prompt_tokens = int(prompt.sum(dtype=np.int64))
    sharing = int(shared.sum(dtype=np.int64)) / num_prompt_tokens
    return replace(
        plan,
        summary=replace(
            plan.summary,
            num_requests=len(positions),
            num_prompt_tokens=num_prompt_tokens,
            estimated_output_tokens=float(mean.sum()),
            compute_s=float(compute.sum()),
            memory_s=spread_memory_s,
            density=float(compute_density(compute.sum(), spread_memory_s)),
            prefix_sharing_best=sharing,
            prefix_sharing_planned=sharing,
            optimum_s=practical_optimum_s(
                model, device, prompt, shared, mean, second_moment, max_num_batched_tokens
            ),
            estimated_duration_s=None,
        ),
        seq=frozen(plan.seq[positions]),
        num_prompt_tokens=frozen(prompt),
        num_shared_tokens=frozen(shared),
        max_tokens=frozen(plan.max_tokens[positions]),
        estimated_output_tokens=frozen(mean),
        estimated_output_tokens_sq=frozen(second_moment),
        compute_s=frozen(compute),
        memory_s=frozen(plan.memory_s[positions]),
        lead=frozen(plan.lead[positions]),
        length_group=frozen(plan.length_group[positions]),
        progress=frozen(np.empty(0)),
        planned_density=frozen(np.empty(0)),
    )


def _cheapest(cuts: Ints, done: Floats, shared: npt.NDArray[np.int32], slack_s: float) -> Ints:
    """Returns the cuts moved, by `slack_s` of work at most, to where the fewest shared tokens are parted."""
    moved = cuts.copy()
    for index, cut in enumerate(cuts.tolist()):
        first = int(np.searchsorted(done, done[cut] - slack_s, side="left"))
        last = int(np.searchsorted(done, done[cut] + slack_s, side="right"))
        candidates = np.arange(first, last)
        # Nothing is parted at either end of the plan.
        cost = np.where(candidates < len(shared), shared[np.minimum(candidates, len(shared) - 1)], 0)
        moved[index] = candidates[np.lexsort((candidates, np.abs(candidates - cut), cost))[0]]
    return moved


@numba.njit(cache=True, nogil=True)
def _scan(compute: Floats, memory: Floats, num_shards: int) -> tuple[Ints, Ints]:
    """Returns `(num_shards - 1,)` how far both cursors have come when each shard but the last is full.

    The left cursor takes while the work taken is less dense than the whole, the right one otherwise.
    """
    total_compute, total_memory = compute.sum(), memory.sum()
    lefts, rights = np.empty(num_shards - 1, dtype=np.int64), np.empty(num_shards - 1, dtype=np.int64)
    left, right, shard = 0, len(compute), 0
    taken_compute, taken_memory = 0.0, 0.0
    while shard < num_shards - 1:
        share = (shard + 1) / num_shards * (total_compute + total_memory)
        from_left = taken_compute * total_memory <= taken_memory * total_compute
        next_one = left if from_left else right - 1
        is_over = left == right
        if not is_over:
            # Closed where the work comes nearest to its share.
            half = (compute[next_one] + memory[next_one]) / 2
            is_over = taken_compute + taken_memory + half > share
        if is_over:
            lefts[shard], rights[shard] = left, right
            shard += 1
            continue
        taken_compute += compute[next_one]
        taken_memory += memory[next_one]
        if from_left:
            left += 1
        else:
            right -= 1
    return lefts, rights
