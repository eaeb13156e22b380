"""`density_matched` names every request in its turn, whatever was withdrawn, preempted or is not at hand."""

import pytest
from hand_engine import dense, desk_of, first_in_flight, hidden_kind, long

from blend_core.policies.base import EngineLimits, Side


def test_everything_runs_and_ends_by_itself(make_plan, view):
    desk = desk_of(make_plan, view, [*dense(100), *long([480] * 30)]).run()
    assert sorted(desk.order) == sorted(desk.lengths)
    assert set(desk.of(Side.RIGHT)) == set(range(1_000, 1_030))
    assert desk.policy.upcoming(5) == []


@pytest.mark.parametrize("side", list(Side))
def test_a_preempted_request_that_is_withdrawn_is_not_asked_for_again(make_plan, view, side):
    desk = desk_of(make_plan, view, [*dense(20), *long((480,) * 20)])
    seq = first_in_flight(desk, lambda seq: desk.side[seq] is side)
    desk.preempt(seq)
    desk.policy.begin_step(view)
    desk.kept.pop(seq)
    desk.policy.finished(seq, 0)
    del desk.lengths[seq]
    started = len(desk.order)
    desk.run()
    assert seq not in desk.order[started:]


def test_samples_lead_their_side(make_plan, view):
    requests = [*dense(40), *long([480] * 20)]
    desk = desk_of(make_plan, view, requests, lead=[7, 31, 1_011, 1_003])
    assert set(desk.policy.upcoming(4)) == {7, 31, 1_011, 1_003}
    desk.step(120)
    assert desk.of(Side.RIGHT)[:2] == [1_003, 1_011]
    assert desk.of(Side.LEFT)[:2] == [7, 31]


@pytest.mark.parametrize("side", list(Side))
def test_a_preempted_request_comes_first_on_its_side(make_plan, view, side):
    desk = desk_of(make_plan, view, [*dense(60), *long([480] * 20)], lead=[50])
    while not [seq for seq in desk.output if desk.side[seq] is side]:
        desk.step()
    seq = [seq for seq in desk.output if desk.side[seq] is side][-1]
    desk.preempt(seq)
    assert seq in desk.policy.upcoming(2)
    before = len(desk.order)
    desk.step(40)
    after = [other for other in desk.order[before:] if desk.side[other] is side]
    assert after[0] == seq


def test_upcoming_begins_with_what_will_be_asked_for(make_plan, view):
    desk = desk_of(make_plan, view, [*dense(60), *long([480] * 20 + [150] * 20)], lead=[3, 1_015])
    policy = desk.policy
    while policy.num_waiting:
        budget = policy.begin_step(view)
        while budget > 0:
            admission = policy.next_request(view)
            if admission is None:
                break
            assert admission.seq in policy.upcoming(2)
            upcoming = policy.upcoming(1_000)
            assert len(upcoming) == len(set(upcoming)) == policy.num_waiting
            policy.admitted(admission.seq, admission.side, 0)
            desk.output[admission.seq] = 0
            policy.decoding(admission.seq)
            budget -= desk.prompt[admission.seq]
            desk.update()
        policy.advanced(1)
        for seq in [*desk.output]:
            desk.output[seq] += 1
            if desk.output[seq] == desk.lengths[seq]:
                policy.finished(seq, desk.output.pop(seq))
        desk.update()


@pytest.mark.parametrize("window", [2, 8])
@pytest.mark.parametrize("num_blocks", [60, 200, 1_000])
def test_an_engine_that_has_only_what_is_upcoming_at_hand_never_hangs(make_plan, view, window, num_blocks):
    limits = EngineLimits(4, num_blocks, 500, 2_000)
    requests = [*dense(20, prompt=100), *long([60] * 30), *[(5_000 + n, 20, 400) for n in range(30)]]
    desk = desk_of(
        make_plan,
        view,
        requests,
        limits=limits,
        kinds=[-1] * 50 + [0] * 30,
        lengths={5_000 + n: 10 for n in range(30)},
    )
    while desk.policy.num_waiting or desk.output:
        at_hand = set(desk.policy.upcoming(window))
        view.absent = set(desk.lengths) - at_hand
        desk.step()
        assert desk.output or not desk.policy.num_waiting or desk.order, "nothing ever starts"
        assert desk.clock < 20_000, "it hangs"


def test_what_is_not_at_hand_is_waited_for_while_the_other_side_goes_on(make_plan, view):
    desk = desk_of(make_plan, view, [*dense(60), *long([480] * 20)])
    view.absent = set(range(1_000, 1_020))
    desk.step(5)
    assert desk.of(Side.LEFT)
    assert not desk.of(Side.RIGHT)
    view.absent = set()
    desk.step(200)
    assert desk.of(Side.RIGHT)


def test_the_same_calls_give_the_same_answers(make_plan, view):
    runs = [hidden_kind(make_plan, type(view)(), truth=40, num=200).run() for _ in range(2)]
    assert runs[0].order == runs[1].order
    assert runs[0].budgets == runs[1].budgets
    assert runs[0].side == runs[1].side


def test_one_request_runs_alone(make_plan, view):
    for output in (1, 900):
        assert desk_of(make_plan, type(view)(), [(3, 10, output)]).run().order == [3]


def test_one_larger_than_kv_is_named_when_nothing_runs_so_that_it_can_fail(make_plan, view):
    desk = desk_of(make_plan, view, [(3, 10, 900)], limits=EngineLimits(4, 20, 8, 64))
    desk.policy.begin_step(view)
    assert desk.policy.next_request(view).seq == 3


def test_the_head_of_the_right_side_is_at_hand_even_if_it_never_fits_ahead(make_plan, view):
    # Answers of unknown length that may be longer than KV is, and known ones that share a prefix.
    requests = [*long([60] * 30), *[(5_000 + n, 20, 500) for n in range(5)], *dense(40, prompt=100)]
    desk = desk_of(
        make_plan,
        view,
        requests,
        limits=EngineLimits(4, 60, 500, 2_000),
        kinds=[-1] * 30 + [0] * 5 + [-1] * 40,
        shared=[0] + [16] * 29 + [0] * 45,
        lengths={5_000 + n: 10 for n in range(5)},
    )
    while desk.policy.num_waiting or desk.output:
        view.absent = set(desk.lengths) - set(desk.policy.upcoming(8))
        desk.step()
        assert desk.clock < 5_000, "it hangs"
