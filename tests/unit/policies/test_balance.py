"""Whether two sides are kept in proportion: what it gains, the room that it takes, what is known."""

from dataclasses import replace

import pytest
from hand_engine import LIMITS, dense, desk_of, long

from blend_core.policies.balance import balance_pays
from blend_core.policies.base import Admission, Side
from blend_core.policies.pace import RunningWork


def pays(desk, hidden_share, limits=LIMITS, running=None):
    policy = desk.policy
    pace = replace(policy._pace, hidden_share=hidden_share)
    return balance_pays(pace, policy._sides, policy._ledger, running or RunningWork(), limits)


@pytest.fixture
def desk(make_plan, view):
    return desk_of(make_plan, view, [*dense(100), *long([480] * 30)])


def test_it_must_hide_more_than_the_room_of_two_prompts(desk):
    # Two prompts of 400 tokens of 4,000.
    assert pays(desk, 0.21)
    assert not pays(desk, 0.19)


def test_it_must_hide_more_than_a_place_in_flight(desk):
    few = replace(LIMITS, max_num_seqs=4, num_blocks=100_000)
    assert pays(desk, 0.26, few)
    assert not pays(desk, 0.24, few)


def test_nothing_is_held_back_by_lengths_unseen_while_all_has_room(make_plan, view):
    requests = [*dense(100), *long([480] * 30)]
    roomy = replace(LIMITS, num_blocks=16_000)
    hidden = desk_of(make_plan, view, requests, kinds=[*[-1] * 100, *[0] * 30], limits=roomy)
    unseen = hidden.policy._sides.kind(hidden.policy._ledger.slot_of[1_000]).lengths
    # Prompts of 40,600 tokens, 200 answered, and 30 answers that are expected to be so long.
    num_tokens = 40_800 + 30 * unseen.mean
    for num_more, is_balanced in ((-100, False), (100, True)):
        limits = replace(roomy, num_blocks=int((num_tokens - num_more) / roomy.block_size))
        assert pays(hidden, 0.5, limits) is is_balanced
    running = RunningWork(num_output_tokens=40_000.0)
    assert pays(hidden, 0.5, roomy, running)
    assert not pays(hidden, 0.5, roomy)
    assert pays(desk_of(make_plan, view, requests, limits=roomy), 0.5, roomy)


def test_where_it_does_not_pay_the_right_side_waits_for_no_prompt_of_the_left(make_plan, view):
    for num_dense, expected in ((300, None), (50, Admission(1_000, Side.RIGHT))):
        desk = desk_of(make_plan, type(view)(), [*dense(num_dense), *long([480] * 30)])
        desk.policy.begin_step(desk.view)
        # The left side's prompt of 400 tokens needs 101 blocks, and a block for each in flight to grow.
        desk.view.num_running, desk.view.num_free_blocks = 5, 105
        assert desk.policy.next_request(desk.view) == expected


def test_where_the_right_side_is_not_at_hand_the_left_goes_on(make_plan, view):
    desk = desk_of(make_plan, view, [*dense(50), *long([480] * 30)])
    view.absent = set(range(1_000, 1_030))
    desk.policy.begin_step(view)
    assert desk.policy.next_request(view) == Admission(0, Side.LEFT)
