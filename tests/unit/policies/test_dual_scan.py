"""The dual scan shares KV between both ends of the plan by density, and rations starts by token credit."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend_core.policies.base import Admission, EngineLimits, Side
from blend_core.policies.dual_scan import DualScanPolicy
from blend_core.policies.side_account import memory_split

LIMITS = EngineLimits(block_size=4, num_blocks=1_000, max_num_seqs=1_000, max_num_batched_tokens=2_048)


def start(policy, view, num_cached_tokens=0):
    """Admits what the policy asks for, if anything, and decodes it."""
    admission = policy.next_request(view)
    if admission is not None:
        policy.admitted(admission.seq, admission.side, num_cached_tokens)
        policy.decoding(admission.seq)
        view.num_running += 1
    return admission


def start_all(policy, view):
    started = []
    while (admission := start(policy, view)) is not None:
        started.append(admission)
    return started


def test_the_papers_figure_6():
    left, right = memory_split(60, 3.73, 0.096, 1.27)
    assert left == pytest.approx(19.38, abs=0.005)
    assert right == pytest.approx(40.62, abs=0.005)


@given(
    left=st.floats(0, 1e6) | st.just(inf),
    right=st.floats(0, 1e6) | st.just(inf),
    rho=st.floats(0, 1e6) | st.just(inf),
)
def test_shares_are_never_negative_and_make_up_the_whole(left, right, rho):
    share_left, share_right = memory_split(100.0, left, right, rho)
    assert 0 <= share_left <= 100
    assert 0 <= share_right <= 100
    assert share_left + share_right == pytest.approx(100)


@given(left=st.floats(1, 100), right=st.floats(0.001, 0.9))
def test_between_the_ends_both_shares_together_have_the_roots_density(left, right):
    share_left, share_right = memory_split(100.0, left, right, 0.95)
    assert (share_left * left + share_right * right) / 100 == pytest.approx(0.95)


def test_equal_densities_split_evenly():
    assert memory_split(10, 2.0, 2.0, 5.0) == (5.0, 5.0)


def test_a_root_beyond_both_ends_gives_everything_to_the_nearer_one():
    assert memory_split(10, 3.0, 1.0, 4.0) == (10, 0)
    assert memory_split(10, 3.0, 1.0, 0.5) == (0, 10)


def test_both_ends_are_taken(make_plan, view):
    plan = make_plan([(0, 400, 4, 9.0), (1, 400, 4, 8.0), (2, 40, 400, 0.2), (3, 40, 400, 0.1)])
    started = start_all(DualScanPolicy(plan, LIMITS), view)
    assert {admission.seq for admission in started if admission.side is Side.RIGHT} >= {3}
    assert {admission.seq for admission in started if admission.side is Side.LEFT} >= {0}


def test_a_side_fills_to_its_steady_state_and_then_starts_by_credit(make_plan, view):
    # All alike, so a side has 2,000 tokens: N = 2,000 / (100 + 200 / 2) = 10 and C = 10 * 100 / 200 = 5.
    plan = make_plan([(seq, 100, 200, 1.0) for seq in range(100)])
    policy = DualScanPolicy(plan, LIMITS)
    started = start_all(policy, view)
    assert [a.side for a in started].count(Side.LEFT) == 10
    assert [a.side for a in started].count(Side.RIGHT) == 10
    # The ten cost 1,000 tokens of credit and 5 were there: 199 steps pay it back, the next has some.
    quiet = policy.quiet_steps(view)
    assert quiet == 200
    for _ in range(quiet):
        assert policy.next_request(view) is None
        policy.advanced(1)


def test_a_jump_saves_up_what_single_steps_do(make_plan, view):
    plan = make_plan([(seq, 90 + seq % 7, 30, 1.0) for seq in range(200)])
    jumping, walking = DualScanPolicy(plan, LIMITS), DualScanPolicy(plan, LIMITS)
    assert start_all(jumping, view) == start_all(walking, type(view)())
    for num_steps in (1, 7, 40, 3):
        jumping.advanced(num_steps)
        for _ in range(num_steps):
            walking.advanced(1)
        assert jumping.next_request(view) == walking.next_request(view)
        assert jumping.quiet_steps(view) == walking.quiet_steps(view)


def test_early_finishers_make_room_at_once(make_plan, view):
    plan = make_plan([(seq, 100, 200, 1.0) for seq in range(100)])
    policy = DualScanPolicy(plan, LIMITS)
    started = start_all(policy, view)
    policy.advanced(1)
    assert policy.next_request(view) is None
    gone = next(admission for admission in started if admission.side is Side.RIGHT)
    policy.finished(gone.seq, 1)
    view.num_running -= 1
    assert policy.next_request(view).side is Side.RIGHT


def test_a_request_that_outlives_its_estimate_by_far_moves_to_the_right_account(make_plan, view):
    plan = make_plan([(0, 40, 10, 2.0), (1, 40, 10, 1.9), (2, 40, 10, 0.5), (3, 40, 10, 0.4)])
    policy = DualScanPolicy(plan, LIMITS)
    policy.admitted(0, Side.LEFT, 0)
    policy.decoding(0)
    policy.advanced(1)
    ledger = policy._ledger
    policy.advanced(18)
    assert (ledger.num_tokens[Side.LEFT], ledger.num_tokens[Side.RIGHT]) == (40 + 18, 0)
    policy.advanced(1)  # its twentieth output token
    assert (ledger.num_tokens[Side.LEFT], ledger.num_tokens[Side.RIGHT]) == (0, 40 + 19)
    ledger.check_integrity()
    policy.finished(0, 20)
    assert ledger.num_tokens == {Side.LEFT: 0, Side.RIGHT: 0}


def test_shared_tokens_are_charged_to_who_computed_them(make_plan, view):
    plan = make_plan([(0, 40, 10, 2.0), (1, 40, 10, 1.0)], shared=[0, 32])
    policy = DualScanPolicy(plan, LIMITS)
    policy.admitted(0, Side.LEFT, 0)
    policy.admitted(1, Side.LEFT, 32)
    assert policy._ledger.num_tokens[Side.LEFT] == 40 + 8


def test_samples_come_before_the_cursors(make_plan, view):
    plan = make_plan([(seq, 40, 10, 10.0 - seq) for seq in range(10)], lead=(3, 8))
    policy = DualScanPolicy(plan, LIMITS)
    assert set(policy.upcoming(2)) == {3, 8}


def test_a_revision_without_them_keeps_samples_that_still_wait(make_plan, view):
    plan = make_plan([(seq, 40, 10, 10.0 - seq) for seq in range(4)], lead=(1,))
    policy = DualScanPolicy(plan, LIMITS)
    policy.revise(make_plan([(3, 40, 10, 1.0), (2, 40, 10, 0.5)], revision=1))
    assert sorted(policy.upcoming(4)) == [0, 1, 2, 3]
    assert policy.num_waiting == 4


def test_the_gate_opens_when_nothing_runs(make_plan, view):
    plan = make_plan([(0, 3_990, 10, 2.0), (1, 3_990, 10, 1.0)])
    assert start(DualScanPolicy(plan, LIMITS), view) is not None


def test_the_other_side_starts_where_a_head_is_not_there_yet(make_plan, view):
    plan = make_plan([(0, 40, 10, 2.0), (1, 40, 10, 1.0)])
    view.absent.add(0)
    assert DualScanPolicy(plan, LIMITS).next_request(view) == Admission(1, Side.RIGHT)


def test_requests_that_read_no_kv_still_run(make_plan, view):
    plan = make_plan([(seq, 40, 1, inf if seq < 5 else 0.5) for seq in range(10)])
    policy = DualScanPolicy(plan, LIMITS)
    seen = set()
    while (admission := policy.next_request(view)) is not None:
        policy.admitted(admission.seq, admission.side, 0)
        policy.decoding(admission.seq)
        policy.advanced(1)
        policy.finished(admission.seq, 1)
        seen.add(admission.seq)
    assert seen == set(range(10))


def test_a_step_prefills_what_both_sides_may_start_in_multiples_of_128(make_plan, view):
    # Both sides have 2,000 tokens: C = 2,000 / (100 + 20 / 2) * 100 / 20 = 91 each.
    plan = make_plan([(seq, 100, 20, 1.0) for seq in range(100)])
    view.num_decoding = 7
    assert DualScanPolicy(plan, LIMITS).begin_step(view) == 256
    view.num_decoding = 2_000
    assert DualScanPolicy(plan, LIMITS).begin_step(view) == 48


def test_only_unshared_prompt_tokens_are_computed_while_all_are_read(make_plan, view):
    # N = 2,000 / (1,000 + 10 / 2) and C = N * 200 / 10 = 40 for each side.
    plan = make_plan([(seq, 1_000, 10, 1.0) for seq in range(10)], shared=[0, *[800] * 9])
    policy = DualScanPolicy(plan, LIMITS)
    policy.finished(0, 0)
    accounts = policy._accounts
    assert accounts[Side.LEFT].credit_tokens_per_step == pytest.approx(2_000 / 1_005 * 20)


def test_a_step_prefills_all_it_can_once_one_side_has_run_out(make_plan, view):
    policy = DualScanPolicy(make_plan([(0, 100, 2, 1.0)]), LIMITS)
    policy.admitted(0, Side.LEFT, 0)
    assert policy.begin_step(view) == 2_048


def test_a_preempted_request_is_no_measure_of_its_sides_share(make_plan, view):
    # It came to the right side by outliving its estimate: its density would leave that side nothing.
    plan = make_plan([(0, 40, 10, 50.0), (1, 40, 10, 50.0), (2, 40, 500, 0.2), (3, 40, 500, 0.1)])
    policy = DualScanPolicy(plan, LIMITS)
    before = policy._accounts[Side.RIGHT].capacity_tokens
    policy.admitted(0, Side.RIGHT, 0)
    policy.preempted(0)
    assert policy._accounts[Side.RIGHT].capacity_tokens == before
    assert 0 in policy.upcoming(2)


def test_the_left_side_may_use_the_room_that_is_kept_for_growth(make_plan, view):
    # 50 of 1,000 blocks are free, which is what the right side must leave.
    plan = make_plan([(0, 100, 2, 5.0), (1, 100, 2, 4.0), (2, 100, 400, 0.2), (3, 100, 400, 0.1)])
    policy = DualScanPolicy(plan, LIMITS)
    view.num_free_blocks, view.num_running = 50, 10
    assert policy.next_request(view).side is Side.LEFT
    view.num_running = 30  # each may need a block soon: 20 are left, and the prompt needs 26
    assert policy.next_request(view) is None


def test_a_request_behind_a_long_prefix_in_flight_starts_before_its_side_has_room_again(make_plan, view):
    plan = make_plan([(0, 40, 10, 50.0), *((seq, 5_000, 500, 0.1) for seq in range(1, 20))])
    policy = DualScanPolicy(plan, replace(LIMITS, num_blocks=10_000))
    last = min(start.seq for start in start_all(policy, view) if start.side is Side.RIGHT)
    assert last > 1
    assert policy.next_request(view) is None
    view.held = {last - 1: 1_024}  # 4,096 tokens
    assert policy.next_request(view) == Admission(last - 1, Side.RIGHT)
    view.held = {last - 1: 1_023}
    assert policy.next_request(view) is None
