from collections.abc import Callable

from blend_core.partition import SHARDS_PER_RANK
from blend_core.plan import Plan
from flows.stages.cut import cut_for_ranks

MakePlan = Callable[..., Plan]


def test_one_rank_has_the_whole_plan_as_one_shard(make_plan: MakePlan) -> None:
    assert cut_for_ranks(make_plan((4, 2, 0, 1, 3)), [0]) == [(0, [4, 2, 0, 1, 3])]


def test_samples_are_spread_evenly_and_every_request_is_in_one_shard(make_plan: MakePlan) -> None:
    plan = make_plan(tuple(range(200)), lead=tuple(range(0, 200, 20)))

    pieces = cut_for_ranks(plan, [0, 2])

    assert pieces[:2] == [(0, [0, 40, 80, 120, 160]), (2, [20, 60, 100, 140, 180])]
    assert sorted(seq for _, seqs in pieces for seq in seqs) == list(range(200))
    assert {rank for rank, _ in pieces} == {0, 2}
    assert len(pieces) == 2 + 2 * SHARDS_PER_RANK


def test_no_shard_is_empty(make_plan: MakePlan) -> None:
    pieces = cut_for_ranks(make_plan((0, 1, 2)), [0, 1])

    assert sorted(seqs for _, seqs in pieces) == [[0], [1], [2]]
    assert cut_for_ranks(make_plan(()), [0, 1]) == []
