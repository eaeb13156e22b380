"""The ablation's `dfs` with the admission rule of `density_matched`: what waits keeps its turn."""

import pytest
from hand_engine import LIMITS, Desk, dense, long

from blend_core.policies.base import Side
from blend_core.studies.dfs_ahead import DfsAheadPolicy


@pytest.fixture
def desk(make_plan, view):
    """Long answers of which few fit KV ahead, then short ones that would fit the gap, then long prompts."""
    requests = [*long([480] * 30), *long([150] * 30, first=2_000), *dense(200)]
    plan = make_plan([(*row, 1.0) for row in requests])
    lengths = {seq: output for seq, _, output in requests}
    return Desk(plan, view, lengths, LIMITS, DfsAheadPolicy(plan, LIMITS))


def test_requests_start_in_planned_order(desk):
    desk.run()
    assert desk.order == desk.plan.seq.tolist()
    assert set(desk.side.values()) == {Side.RIGHT}


def test_one_starts_where_kv_has_room_up_to_the_end_of_its_answer(desk):
    desk.step()
    at_their_end = sum(desk.prompt[seq] + desk.lengths[seq] for seq in desk.order)
    assert 3_000 <= at_their_end <= 4_000
    # There is room by now, but there will be none.
    assert desk.view.num_free_blocks > 400
    assert desk.policy.next_request(desk.view) is None


def test_a_preempted_request_comes_before_the_rest(desk):
    desk.step(10)
    seq, following = desk.order[3], len(desk.order)
    desk.preempt(seq)
    assert desk.policy.upcoming(1) == [seq]
    desk.step(400)
    assert desk.order[following] == seq
