"""`fcfs`, `dfs` and `random` take the plan from the left while the next prompt fits 95 % of KV."""

import pytest

from blend_core.errors import ConfigurationError, PlanError
from blend_core.policies.base import Admission, EngineLimits, Side
from blend_core.policies.factory import POLICY_NAMES, make_policy

LIMITS = EngineLimits(block_size=4, num_blocks=100, max_num_seqs=8, max_num_batched_tokens=64)
IN_ORDER = ("fcfs", "dfs", "random")


@pytest.fixture(params=IN_ORDER)
def policy(request, make_plan):
    plan = make_plan([(7, 40, 8, 3.0), (2, 40, 8, 2.0), (5, 40, 8, 1.0)])
    return make_policy(request.param, plan, LIMITS)


def test_the_plan_is_taken_from_the_left(policy, view):
    order = []
    while (admission := policy.next_request(view)) is not None:
        order.append(admission.seq)
        policy.admitted(admission.seq, admission.side, 0)
        view.num_running += 1
    assert order == [7, 2, 5]
    assert policy.num_waiting == 0


def test_a_prompt_waits_until_it_fits_95_percent_of_kv(policy, view):
    view.num_running = 1
    view.num_free_blocks = 15  # 85 of 95 blocks taken; 40 tokens and the next one need 11
    assert policy.next_request(view) is None
    view.num_free_blocks = 16
    assert policy.next_request(view) == Admission(7, Side.LEFT)


def test_blocks_that_others_hold_need_no_room(policy, view):
    view.num_running = 1
    view.num_free_blocks = 15
    view.held[7] = 1
    assert policy.next_request(view) == Admission(7, Side.LEFT)


def test_the_gate_opens_when_nothing_runs(policy, view):
    view.num_free_blocks = 1
    assert policy.next_request(view) == Admission(7, Side.LEFT)


def test_a_head_whose_tokens_are_not_there_is_waited_for(policy, view):
    view.absent.add(7)
    assert policy.next_request(view) is None


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_no_more_than_max_num_seqs_run(name, make_plan, view):
    plan = make_plan([(seq, 40, 8, 1.0) for seq in range(10)])
    policy = make_policy(name, plan, LIMITS)
    for seq in range(8):
        policy.admitted(seq, Side.LEFT, 0)
    for view.num_running, may_start in ((7, True), (8, False)):
        policy.begin_step(view)
        assert (policy.next_request(view) is not None) is may_start


def test_a_preempted_request_comes_first_and_needs_room_for_its_output(policy, view):
    for seq in (7, 2):
        policy.admitted(seq, Side.LEFT, 0)
        policy.decoding(seq)
    policy.advanced(1)
    policy.advanced(6)
    policy.preempted(7)
    assert policy.num_waiting == 2
    assert policy.upcoming(3) == [7, 5]
    view.num_running = 1
    view.num_free_blocks = 16  # 11 blocks may be taken; 40 + 7 tokens and the next one need 12
    assert policy.next_request(view) is None
    view.num_free_blocks = 17
    assert policy.next_request(view) == Admission(7, Side.LEFT)


def test_what_decoding_leaves_is_the_budget(policy, view):
    view.num_decoding = 10
    assert policy.begin_step(view) == 54
    view.num_decoding = 100
    assert policy.begin_step(view) == 0


def test_a_withdrawn_request_is_never_asked_for(policy, view):
    policy.finished(7, 0)
    assert policy.num_waiting == 2
    assert policy.next_request(view) == Admission(2, Side.LEFT)


def test_a_revision_reorders_and_what_it_leaves_out_goes_last(policy, view, make_plan):
    policy.revise(make_plan([(5, 40, 8, 1.0), (2, 40, 8, 2.0)], revision=2))
    assert policy.upcoming(3) == [5, 2, 7]
    assert policy.num_waiting == 3


def test_an_earlier_revision_is_refused(policy, make_plan):
    policy.revise(make_plan([(5, 40, 8, 1.0)], revision=1))
    with pytest.raises(PlanError, match="earlier than 1"):
        policy.revise(make_plan([(7, 40, 8, 1.0)], revision=0))


def test_the_same_revision_may_bring_more_requests(policy, view, make_plan):
    num_waiting = policy.num_waiting
    policy.revise(make_plan([(5, 40, 8, 1.0), (9, 40, 8, 1.0)], revision=0))
    assert policy.num_waiting == num_waiting + 1
    assert policy.upcoming(2) == [5, 9]


def test_a_plan_for_another_block_size_is_refused(make_plan):
    with pytest.raises(PlanError, match="blocks of 8 tokens"):
        make_policy("dfs", make_plan([(0, 4, 4, 1.0)], block_size=8), LIMITS)


def test_a_plan_that_names_a_request_twice_is_refused(make_plan):
    with pytest.raises(PlanError, match="twice"):
        make_policy("dfs", make_plan([(0, 4, 4, 1.0), (0, 4, 4, 1.0)]), LIMITS)


def test_an_unknown_policy_is_refused_with_the_names_there_are(make_plan):
    with pytest.raises(ConfigurationError, match="fcfs, dfs, random, dual_scan"):
        make_policy("sjf", make_plan([(0, 4, 4, 1.0)]), LIMITS)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_policy_is_made_by_its_name(name, make_plan):
    assert make_policy(name, make_plan([(0, 4, 4, 1.0)]), LIMITS).name == name
