"""`density_matched` fills KV ahead of time with long answers and computes the others at an even pace."""

from dataclasses import fields, replace

import pytest
from hand_engine import LIMITS, dense, desk_of, first_in_flight, hidden_kind, long

from blend_core.performance import StepTimeModel
from blend_core.policies.base import Admission, Side
from blend_core.policies.density_matched import ALL_RULES, CHUNK_TOKENS
from blend_core.policies.matching_rules import MatchingRules


def test_the_longest_start_first_until_kv_ahead_is_full(make_plan, view):
    # Of 4,000 tokens of KV six of 500 tokens at their end leave room for no seventh beside the left side.
    desk = desk_of(make_plan, view, [*dense(100), *long([480, 475, 470, 465, 479, 477] + [474] * 30)])
    desk.step()
    assert desk.of(Side.RIGHT)[:6] == [1_000, 1_004, 1_005, 1_001, 1_006, 1_007]
    at_their_end = sum(20 + desk.lengths[seq] for seq in desk.of(Side.RIGHT))
    assert at_their_end <= 4_000
    assert at_their_end >= 2_500
    # KV is nearly empty by now, but it will not be.
    assert view.num_free_blocks > 400
    desk.step(100)
    assert sum(20 + desk.lengths[seq] for seq in desk.of(Side.RIGHT)) <= 4_000


def test_a_shorter_one_goes_before_its_turn_into_a_gap(make_plan, view):
    desk = desk_of(make_plan, view, [*dense(200), *long([480] * 30 + [150] * 30)])
    desk.step()
    started = [desk.lengths[seq] for seq in desk.of(Side.RIGHT)]
    first_short = started.index(150)
    assert set(started[:first_short]) == {480}
    assert started[first_short:] == [150] * (len(started) - first_short)
    assert 480 in [desk.lengths[seq] for seq in range(1_000, 1_030) if seq not in desk.order]


def test_one_that_shares_a_prefix_does_not_leave_it_to_fill_a_gap(make_plan, view):
    requests = [*dense(200), *long([480] * 30), *long([150] * 30, first=2_000)]
    desk = desk_of(make_plan, view, requests, shared=[0] * 231 + [16] * 29)
    desk.step()
    assert all(seq < 2_000 for seq in desk.order)


def test_room_is_kept_for_the_left_side(make_plan, view):
    alone = desk_of(make_plan, view, [*dense(12), *long([480] * 30)]).step()
    num_right = len(alone.of(Side.RIGHT))
    # Left answers of some length hold KV for a while.
    beside = desk_of(make_plan, type(view)(), [*[(n, 300, 30) for n in range(600)], *long([480] * 30)]).step()
    assert set(beside.of(Side.RIGHT)) <= set(range(1_000, 1_030))
    assert 0 < len(beside.of(Side.RIGHT)) < num_right


def test_the_right_side_waits_while_the_left_waits_for_kv(make_plan, view):
    desk = desk_of(make_plan, view, [*dense(300), *long([480] * 30)])
    policy = desk.policy
    policy.begin_step(view)
    assert policy.next_request(view) == Admission(1_000, Side.RIGHT)
    # The left side's prompt of 400 tokens needs 101 blocks, and a block for each in flight to grow.
    view.num_running, view.num_free_blocks = 5, 105
    assert policy.next_request(view) is None
    view.num_free_blocks = 106
    assert policy.next_request(view) is not None


def test_the_left_side_is_computed_in_step_with_the_kv_that_is_read(make_plan, view):
    desk = desk_of(make_plan, view, [*dense(1_500), *long([450] * 60, first=5_000)])
    prompts, read = [], []
    for _ in range(400):
        num_before = len(desk.of(Side.LEFT))
        read.append(sum(desk.prompt[seq] + output for seq, output in desk.output.items()))
        desk.step()
        prompts.append(400 * (len(desk.of(Side.LEFT)) - num_before))
    # Over stretches of steps: where more is read more is computed.
    stretches = [(sum(read[at : at + 100]), sum(prompts[at : at + 100])) for at in range(0, 400, 100)]
    assert stretches == sorted(stretches)
    assert stretches[-1][1] > 1.3 * stretches[0][1]


def test_once_the_left_side_is_done_a_step_computes_all_it_has_room_for(make_plan, view):
    desk = desk_of(make_plan, view, long([480] * 30))
    desk.step(2)
    assert desk.policy.begin_step(view) == LIMITS.max_num_batched_tokens - view.num_decoding


def test_a_budget_is_never_below_a_token_nor_above_what_decoding_leaves(make_plan, view):
    desk = desk_of(make_plan, view, [*dense(100), *long([480] * 30)])
    view.num_decoding = 1_999
    assert desk.policy.begin_step(view) == 1
    view.num_decoding = 2_000
    assert desk.policy.begin_step(view) == 0


def test_few_prompt_tokens_a_step_are_saved_up_to_a_chunk(make_plan, view):
    # Reading the weights takes as long as 30 tokens and the fixed part: so many cost nothing in any step.
    times = StepTimeModel(1e-3, 1e-5, 1.3e-3, 1e-9, 1e-6, 0.15)
    requests = [*dense(10_000, prompt=40), *long((3_000,) * 20, first=20_000)]
    desk = desk_of(make_plan, view, requests, step_times=times)
    desk.step(400)
    paced = desk.budgets[100:]
    assert {budget == 0 or budget >= CHUNK_TOKENS for budget in paced} == {True}
    assert 0 < sum(budget > 0 for budget in paced) <= 250


def test_a_chunk_is_no_larger_than_a_step(make_plan, view):
    limits = replace(LIMITS, max_num_batched_tokens=64)
    desk = desk_of(make_plan, view, [*dense(20, prompt=40), *long((900,) * 10)], limits)
    desk.run()
    left = [place for place, seq in enumerate(desk.order) if desk.side[seq] is Side.LEFT]
    assert len(left) == 20
    assert desk.clock < 3_000


def test_room_is_kept_for_what_the_next_prompt_of_the_left_side_does_not_find(make_plan, view):
    requests = [*dense(200), *long((200,) * 20, prompt=50)]
    limits = []
    for num_held_blocks in (0, 75):
        desk = desk_of(make_plan, view, requests, shared=[*[300] * 200, *[0] * 20])
        view.held = dict.fromkeys(range(200), num_held_blocks)
        desk.policy.begin_step(view)
        limits.append(desk.policy._right_limit_tokens)
    assert limits[1] - limits[0] == 300


def test_with_nothing_to_decode_a_step_computes_a_chunk_at_least(make_plan, view):
    desk = desk_of(make_plan, view, [*dense(2_000, prompt=40), *long((3_000,) * 20, first=5_000)])
    assert desk.policy.begin_step(view) >= CHUNK_TOKENS


def test_requests_without_an_answer_tell_nothing_of_lengths(make_plan, view):
    desk = hidden_kind(make_plan, view, truth=400, num=60)
    seq = first_in_flight(desk, lambda seq: 5_000 <= seq < 6_000)
    lengths = desk.policy._sides.kind(desk.policy._ledger.slot_of[seq]).lengths
    before = lengths.counts.sum()
    desk.policy.finished(seq, 0)
    desk.policy.prepare()
    assert lengths.counts.sum() == before
    other = first_in_flight(desk, lambda other: 5_000 <= other < 6_000 and other != seq)
    desk.policy.finished(other, 7)
    desk.policy.prepare()
    assert lengths.counts.sum() == before + 1


def test_a_first_plan_of_any_revision_is_sorted_alike(make_plan, view):
    requests = [*dense(100), *((5_000 + n, 50, 500) for n in range(60)), *long((300,) * 40)]
    kinds = [-1] * 100 + [0] * 60 + [-1] * 40
    sides = []
    for revision in (0, 3):
        desk = desk_of(make_plan, view, requests, kinds=kinds, revision=revision)
        sides.append(desk.policy._sides.work(Side.RIGHT))
    assert sides[0] == sides[1]


def test_a_kind_of_short_answers_goes_to_the_left_in_mid_run(make_plan, view):
    desk = hidden_kind(make_plan, view, truth=2, num=3_000).run()
    sides = [desk.side[seq] for seq in desk.order if seq >= 5_000]
    assert len(sides) == 3_000
    assert sides[0] is Side.RIGHT
    assert sides[-1] is Side.LEFT


def test_a_kind_of_long_answers_goes_to_the_right_in_mid_run(make_plan, view):
    desk = hidden_kind(make_plan, view, truth=900, num=40, prompt=300, num_dense=0, outputs=(500,) * 60).run()
    sides = [desk.side[seq] for seq in desk.order if seq >= 5_000]
    assert sides[0] is Side.LEFT
    assert sides[-1] is Side.RIGHT


def test_a_revision_keeps_what_was_learned(make_plan, view):
    desk = hidden_kind(make_plan, view, truth=2, num=3_000)
    while not desk.order or desk.side[desk.order[-1]] is Side.RIGHT or desk.order[-1] < 5_000:
        desk.step()
    waiting = desk.policy.upcoming(10_000)
    hidden = [seq for seq in waiting if seq >= 5_000]
    assert len(hidden) > 1_000
    rows = [(seq, desk.prompt[seq], desk.lengths[seq] if seq < 5_000 else 500, 1.0) for seq in waiting]
    kinds = [0 if seq >= 5_000 else -1 for seq in waiting]
    desk.policy.revise(make_plan(rows, revision=1, kinds=kinds))
    before = len(desk.order)
    desk.run()
    assert {desk.side[seq] for seq in desk.order[before:] if seq >= 5_000} == {Side.LEFT}


def test_where_a_prompt_takes_much_of_kv_a_step_computes_all_it_can(make_plan, view):
    # Balancing would keep room for a prompt of 1,600 of the 4,000 tokens, and bring it in chunk by chunk.
    desk = desk_of(make_plan, view, [*dense(30, prompt=1_600), *long([200] * 30)])
    desk.step(40)
    assert min(desk.budgets) > 1_900
    roomy = replace(LIMITS, num_blocks=100_000)
    desk = desk_of(make_plan, type(view)(), [*dense(300, prompt=1_600), *long([2_000] * 300)], limits=roomy)
    desk.step(40)
    assert min(desk.budgets[1:]) < 1_000


def test_where_few_may_run_at_once_a_step_computes_all_it_can(make_plan, view):
    few = replace(LIMITS, max_num_seqs=2)
    desk = desk_of(make_plan, view, [*dense(30, prompt=40), *long([200] * 30)], limits=few)
    desk.step(40)
    assert min(desk.budgets) >= 1_998


def test_answers_of_unknown_length_fill_kv_only_where_the_left_side_does_not_need_it(make_plan, view):
    num_started = []
    for num_dense in (0, 3_000):
        requests = [*dense(num_dense, prompt=20), *[(5_000 + n, 100, 500) for n in range(200)]]
        desk = desk_of(make_plan, type(view)(), requests, kinds=[-1] * num_dense + [0] * 200)
        num_started.append(len(desk.step(3).of(Side.RIGHT)))
    alone, beside = num_started
    assert alone * 100 > 0.8 * 4_000
    assert 0 < beside * 100 < 0.7 * 4_000


@pytest.mark.parametrize("idea", [field.name for field in fields(MatchingRules)])
def test_a_run_without_one_of_its_ideas_is_another_run(make_plan, view, idea):
    hidden = [(5_000 + n, 50, 500) for n in range(100)]
    requests = [*dense(2_000, prompt=100), *long([480] * 30 + [150] * 30, first=8_000), *hidden]
    lengths = {seq: 20 + 40 * (place % 20) for place, (seq, _, _) in enumerate(hidden)}
    kinds = [-1] * 2_060 + [0] * 100
    runs = []
    for rules in (ALL_RULES, replace(ALL_RULES, **{idea: False})):
        desk = desk_of(make_plan, type(view)(), requests, lengths=lengths, kinds=kinds, rules=rules).run()
        runs.append((desk.order, desk.budgets))
    assert runs[0] != runs[1]


def test_where_reading_weights_binds_kv_is_filled_without_a_look_ahead(make_plan, view):
    num_started = []
    for weight_read_s in (1e-5, 1e-1):
        times = StepTimeModel(1e-5, 1e-5, weight_read_s, 1e-9, 1e-6, 0.15)
        requests = [*dense(100), *long([480] * 60, prompt=100)]
        desk = desk_of(make_plan, type(view)(), requests, step_times=times)
        num_started.append(len(desk.step(2).of(Side.RIGHT)))
    ahead, now = num_started
    # Of 4,000 tokens of KV six take 3,480 at their end and 600 when they start.
    assert 4 <= ahead <= 6
    assert now > 2 * ahead
