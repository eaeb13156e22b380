"""A plan cut into shards for the ranks of a run."""

from collections.abc import Sequence

import numpy as np

from blend_core.partition import SHARDS_PER_RANK, partition
from blend_core.plan import Plan
from flows.job_source import part_of_plan


def cut_for_ranks(plan: Plan, ranks: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Returns each rank's shards as seqs in the order of the plan; every request is in one, none is empty.

    A single rank has one shard. Of several, the samples are spread evenly over the ranks as a shard each, so
    that the next revision waits for none of them; the rest is cut by `partition`.
    """
    if len(ranks) == 1 or len(plan) == 0:
        return [(rank, plan.seq.tolist()) for rank in ranks[:1] if len(plan)]
    leads = plan.seq[plan.lead]
    pieces = [(rank, leads[place :: len(ranks)].tolist()) for place, rank in enumerate(ranks)]
    rest = part_of_plan(plan, ~plan.lead)
    if len(rest):
        for shard in partition(rest, len(ranks), SHARDS_PER_RANK):
            pieces.append((ranks[shard.rank], rest.seq[np.sort(shard.positions)].tolist()))
    return [(rank, seqs) for rank, seqs in pieces if seqs]
