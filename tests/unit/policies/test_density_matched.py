"""`density_matched` fills KV ahead of time with long answers and computes the others at an even pace."""

from dataclasses import replace

import pytest

from blend_core.policies.base import Admission, EngineLimits, Side
from blend_core.policies.density_matched import CHUNK_TOKENS
from blend_core.policies.factory import make_policy

LIMITS = EngineLimits(block_size=4, num_blocks=1_000, max_num_seqs=500, max_num_batched_tokens=2_000)


class Desk:
    """An engine by hand: prompts are complete in the step that starts them, and nothing is cached."""

    def __init__(self, plan, view, lengths, limits=LIMITS):
        self.plan, self.view, self.lengths, self.limits = plan, view, dict(lengths), limits
        self.prompt = dict(zip(plan.seq.tolist(), plan.num_prompt_tokens.tolist(), strict=True))
        self.policy = make_policy("density_matched", plan, limits)
        self.output, self.side, self.order, self.budgets = {}, {}, [], []
        self.kept = {}
        self.clock = self.num_preempted = 0
        self.update()

    def update(self):
        held = [
            -(-(self.prompt[seq] + output + 1) // self.limits.block_size)
            for seq, output in self.output.items()
        ]
        self.view.num_free_blocks = self.limits.num_blocks - sum(held)
        self.view.num_running = self.view.num_decoding = len(self.output)

    def step(self, num_steps=1):
        for _ in range(num_steps):
            self._step()
        return self

    def _step(self):
        budget = self.policy.begin_step(self.view)
        self.budgets.append(budget)
        started = []
        while budget > 0 and (admission := self.policy.next_request(self.view)) is not None:
            seq = admission.seq
            assert self.view.is_ready(seq)
            self.policy.admitted(seq, admission.side, 0)
            self.order.append(seq)
            self.side[seq] = admission.side
            budget -= self.prompt[seq]
            started.append(seq)
            self.output[seq] = self.kept.pop(seq, 0)
            num_decoding = self.view.num_decoding
            self.update()
            self.view.num_decoding = num_decoding
        for seq in started:
            self.policy.decoding(seq)
        self.policy.advanced(1)
        self.clock += 1
        for seq in [*self.output]:
            self.output[seq] += 1
            if self.output[seq] == self.lengths[seq]:
                self.policy.finished(seq, self.output.pop(seq))
        self.update()
        while self.view.num_free_blocks < 0 and len(self.output) > 1:
            self.preempt([*self.output][-1])

    def preempt(self, seq):
        self.kept[seq] = self.output.pop(seq)
        self.policy.preempted(seq)
        self.num_preempted += 1
        self.update()

    def run(self, num_steps=20_000):
        while self.policy.num_waiting or self.output:
            self._step()
            assert self.clock < num_steps, "it hangs"
        return self

    def of(self, side):
        return [seq for seq in self.order if self.side[seq] is side]


def desk_of(make_plan, view, requests, limits=LIMITS, lengths=(), **options):
    plan = make_plan([(*row, 1.0) for row in requests], **options)
    return Desk(plan, view, {**{seq: output for seq, _, output in requests}, **dict(lengths)}, limits)


def dense(num, first=0, prompt=400):
    """Long prompts with next to no answer."""
    return [(first + number, prompt, 2) for number in range(num)]


def long(outputs, first=1_000, prompt=20):
    return [(first + number, prompt, output) for number, output in enumerate(outputs)]


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


def test_everything_runs_and_ends_by_itself(make_plan, view):
    desk = desk_of(make_plan, view, [*dense(100), *long([480] * 30)]).run()
    assert sorted(desk.order) == sorted(desk.lengths)
    assert set(desk.of(Side.RIGHT)) == set(range(1_000, 1_030))
    assert desk.policy.upcoming(5) == []


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
    desk = desk_of(make_plan, view, [*dense(50), *long([480] * 30)])
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
    desk = desk_of(make_plan, view, [*dense(2_000, prompt=40), *long((3_000,) * 20, first=5_000)])
    desk.step(400)
    paced = desk.budgets[100:]
    assert {budget == 0 or budget >= CHUNK_TOKENS for budget in paced} == {True}
    assert 0 < sum(budget > 0 for budget in paced) <= 200


def test_a_chunk_is_no_larger_than_a_step(make_plan, view):
    limits = replace(LIMITS, max_num_batched_tokens=64)
    desk = desk_of(make_plan, view, [*dense(20, prompt=40), *long((900,) * 10)], limits)
    desk.run()
    left = [place for place, seq in enumerate(desk.order) if desk.side[seq] is Side.LEFT]
    assert len(left) == 20
    assert desk.clock < 3_000


def test_room_is_kept_for_what_the_next_prompt_of_the_left_side_does_not_find(make_plan, view):
    requests = [*dense(20, prompt=800), *long((200,) * 20, prompt=50)]
    limits = []
    for num_held_blocks in (0, 175):
        desk = desk_of(make_plan, view, requests, shared=[*[700] * 20, *[0] * 20])
        view.held = dict.fromkeys(range(20), num_held_blocks)
        desk.policy.begin_step(view)
        limits.append(desk.policy._right_limit_tokens)
    assert limits[1] - limits[0] == 700


def first_in_flight(desk, is_wanted):
    """Goes on until a request is in flight that is wanted."""
    while not any(map(is_wanted, desk.output)):
        desk.step()
    return next(filter(is_wanted, desk.output))


def test_with_nothing_to_decode_a_step_computes_a_chunk_at_least(make_plan, view):
    desk = desk_of(make_plan, view, [*dense(2_000, prompt=40), *long((3_000,) * 20, first=5_000)])
    assert desk.policy.begin_step(view) >= CHUNK_TOKENS


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


def test_requests_without_an_answer_tell_nothing_of_lengths(make_plan, view):
    desk = hidden_kind(make_plan, view, truth=400, num=60)
    seq = first_in_flight(desk, lambda seq: 5_000 <= seq < 6_000)
    lengths = desk.policy._sides.kind(desk.policy._ledger.slot_of[seq]).lengths
    before = lengths.counts.sum()
    desk.policy.finished(seq, 0)
    assert lengths.counts.sum() == before
    other = first_in_flight(desk, lambda other: 5_000 <= other < 6_000 and other != seq)
    desk.policy.finished(other, 7)
    assert lengths.counts.sum() == before + 1


def test_a_first_plan_of_any_revision_is_sorted_alike(make_plan, view):
    requests = [*dense(100), *((5_000 + n, 50, 500) for n in range(60)), *long((300,) * 40)]
    kinds = [-1] * 100 + [0] * 60 + [-1] * 40
    sides = []
    for revision in (0, 3):
        desk = desk_of(make_plan, view, requests, kinds=kinds, revision=revision)
        sides.append(desk.policy._sides.work(Side.RIGHT))
    assert sides[0] == sides[1]


def hidden_kind(make_plan, view, *, truth, num, prompt=50, num_dense=100, outputs=(300,) * 40):
    """A kind of unknown length beside dense requests and long ones."""
    requests = [*dense(num_dense), *[(5_000 + n, prompt, 500) for n in range(num)], *long(outputs)]
    kinds = [-1] * num_dense + [0] * num + [-1] * len(outputs)
    lengths = {5_000 + n: truth for n in range(num)}
    return desk_of(make_plan, view, requests, kinds=kinds, lengths=lengths)


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
