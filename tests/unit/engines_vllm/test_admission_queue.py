"""The queue and its gate on a small fake of vLLM's scheduler."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))

from cases import random_job
from checked_policy import CheckedPolicy

from blend_core.engines.vllm.scheduler_view import Readiness, seq_of
from blend_core.errors import EngineError
from blend_core.policies.base import Side
from blend_core.policies.factory import POLICY_NAMES, make_policy
from tests.unit.engines_vllm.fakes import BLOCK_SIZE, FakeRequest, FakeScheduler


class WaitingForItsHead(CheckedPolicy):
    """Names nothing while its head is not ready, whatever else is: the queue has to help itself."""

    def next_request(self, view):
        return self._inner.next_request(view)


class Heard(CheckedPolicy):
    """Remembers the answers that it was told of, by `seq`."""

    def __init__(self, *args):
        super().__init__(*args)
        self.answers = {}

    def finished(self, seq, num_output_tokens):
        self.answers[seq] = num_output_tokens
        super().finished(seq, num_output_tokens)


class Preparing(CheckedPolicy):
    """Counts how often it was let prepare."""

    num_prepared = 0

    def prepare(self):
        self.num_prepared += 1
        super().prepare()


def start(scheduler, job, policy="fcfs", order=None, kind=CheckedPolicy):
    """Begins a run under a policy that checks its contract; returns it."""
    plan = job.plan(order)
    checked = kind(make_policy(policy, plan, scheduler.limits), plan, scheduler.limits)
    scheduler.queue.start(checked, plan.revision)
    return checked


def requests_of(job, run=1):
    return [
        FakeRequest(seq, prompt, output, run)
        for seq, (prompt, output) in enumerate(zip(job.prompts, job.output_tokens, strict=True))
    ]


def run_all(scheduler, job, checked, most_steps=3000):
    ended = []
    for _ in range(most_steps):
        if not checked.num_waiting and not scheduler.running:
            break
        before = set(scheduler.requests)
        scheduler.step()
        ended += [int(one.split("-")[0]) for one in before - set(scheduler.requests)]
    assert sorted(ended) == list(range(len(job.prompts))), "a request never ended"
    assert scheduler.free == scheduler.limits.num_blocks
    assert len(scheduler.queue) == 0


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("num_blocks", [14, 60])
def test_everything_runs_once_under_every_policy_and_its_contract_holds(policy, num_blocks):
    job = random_job(3, num_requests=40, block_size=BLOCK_SIZE, wrong=True)
    scheduler = FakeScheduler(num_blocks=num_blocks)
    checked = start(scheduler, job, policy)
    for request in requests_of(job):
        scheduler.add(request)

    run_all(scheduler, job, checked)

    if num_blocks == 14 and policy != "density_matched":
        assert checked.num_preempted > 0


def test_a_request_is_offered_until_it_is_taken_and_the_gate_closes_behind_the_last():
    job = random_job(0, num_requests=2, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler()
    start(scheduler, job, order=[1, 0])
    first, second = [scheduler.add(one) for one in requests_of(job)]
    scheduler.queue.begin_step()

    assert scheduler.queue
    assert scheduler.queue.peek_request() is second
    assert scheduler.queue.peek_request() is second
    assert scheduler.queue.pop_request() is second
    second.status, second.num_computed_tokens = "running", 0
    assert scheduler.queue
    assert scheduler.queue.pop_request() is first
    first.status = "running"
    assert not scheduler.queue
    assert len(scheduler.queue) == 0
    with pytest.raises(IndexError):
        scheduler.queue.peek_request()


def test_what_waits_is_counted_while_the_gate_is_closed():
    job = random_job(1, num_requests=6, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(max_num_seqs=1)
    start(scheduler, job)
    for request in requests_of(job):
        scheduler.add(request)
    scheduler.step()

    scheduler.queue.begin_step()
    assert not scheduler.queue
    assert len(scheduler.queue) == len(list(scheduler.queue)) == 5


def test_a_skipped_request_is_not_admitted_and_waits_again():
    job = random_job(2, num_requests=4, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(skips={"0-x"})
    checked = start(scheduler, job, order=[0, 1, 2, 3], kind=WaitingForItsHead)
    for request in requests_of(job):
        scheduler.add(request)

    assert scheduler.step()[0] == [1]
    assert checked.admissions == [1]
    assert len(scheduler.queue) == 3
    scheduler.skips.clear()

    run_all(scheduler, job, checked)
    assert 0 in checked.admissions


def test_when_nothing_runs_the_gate_opens_for_what_is_ready_though_the_head_is_not():
    job = random_job(4, num_requests=3, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler()
    checked = start(scheduler, job, order=[0, 1, 2], kind=WaitingForItsHead)
    blocked, *others = [scheduler.add(one) for one in requests_of(job)]
    blocked.readiness = Readiness.BLOCKED
    # What the policy waits for was told to the queue as blocked only now.
    assert not scheduler.queue.is_ready(0)

    ran, _ = scheduler.step()

    assert ran
    assert 0 not in ran
    assert others
    blocked.readiness = Readiness.READY
    run_rest = 0
    while checked.num_waiting or scheduler.running:
        scheduler.step()
        run_rest += 1
        assert run_rest < 500


def test_a_request_that_vllm_refuses_is_offered_to_be_skipped_once_and_then_removed():
    job = random_job(5, num_requests=3, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler()
    checked = start(scheduler, job, order=[0, 1, 2], kind=WaitingForItsHead)
    waiting = requests_of(job)
    waiting[1].readiness = Readiness.BLOCKED
    for request in waiting:
        scheduler.add(request)
    waiting[1].readiness = Readiness.REFUSED

    scheduler.step()
    assert 1 not in checked.admissions
    scheduler.abort(waiting[1])

    while checked.num_waiting or scheduler.running:
        scheduler.step()
    assert sorted(set(checked.admissions)) == [0, 2]


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_an_aborted_request_leaves_the_policy(when):
    job = random_job(6, num_requests=4, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(max_num_seqs=2)
    checked = start(scheduler, job, order=[0, 1, 2, 3])
    waiting = [scheduler.add(one) for one in requests_of(job)]
    for request in waiting:
        request.longest = 50
    scheduler.step()
    scheduler.abort(waiting[0 if when == "running" else 3])

    scheduler.step()

    assert len(checked.in_flight) == len(scheduler.running) == 2
    assert checked.num_waiting == 1


def test_only_answers_tell_how_long_answers_are():
    job = random_job(6, num_requests=3, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(num_blocks=14, max_num_seqs=3)
    heard = start(scheduler, job, order=[0, 1, 2], kind=Heard)
    answered, running, preempted = [scheduler.add(one) for one in requests_of(job)]
    answered.longest, running.longest, preempted.longest = 5, 50, 50
    while answered.status != "finished":
        scheduler.step()
    while not heard.num_preempted:
        scheduler.step()
    assert running.output > 0
    assert preempted.output > 0
    scheduler.control.withdraw([1, 2], [1, 2])
    for request in (running, preempted):
        scheduler.abort(request)
    scheduler.step()

    assert heard.answers == {0: 5, 1: 0, 2: 0}


def test_a_stop_string_ends_an_answer_by_an_abort_that_nobody_asked_for():
    job = random_job(6, num_requests=1, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(num_blocks=40)
    heard = start(scheduler, job, kind=Heard)
    request = scheduler.add(FakeRequest(0, job.prompts[0], 50))
    while request.output < 7:
        scheduler.step()
    scheduler.abort(request)

    scheduler.step()

    assert heard.answers == {0: 7}


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_what_is_withdrawn_is_not_named_again_however_late_vllm_hears_of_it(policy):
    job = random_job(7, num_requests=20, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(max_num_seqs=2)
    checked = start(scheduler, job, policy)
    # The last one is on its way to vLLM, and that before it was not even fetched.
    here = [scheduler.add(one) for one in requests_of(job)[:-2]]
    first = set(scheduler.step()[0])
    withdrawn = [seq for seq in range(20) if seq % 3 == 0 or seq >= 18]

    scheduler.control.withdraw(withdrawn, withdrawn[:-2] + withdrawn[-1:])
    checked.revise(job.plan(revision=1))

    assert not set(scheduler.control.upcoming(20)) & set(withdrawn)
    late = scheduler.add(FakeRequest(19, job.prompts[19], 5))
    started = set()
    for _ in range(3):
        started |= set(scheduler.step()[0])
    assert not started & set(withdrawn) - first
    for request in (*(here[seq] for seq in withdrawn[:-2]), late):
        if request.request_id in scheduler.requests:
            scheduler.abort(request)
    while checked.num_waiting or scheduler.running:
        started |= set(scheduler.step()[0])
    assert first | started >= set(range(20)) - set(withdrawn)
    assert scheduler.queue.is_idle()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_what_is_withdrawn_and_then_preempted_does_not_come_back(policy):
    job = random_job(7, num_requests=8, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(num_blocks=14, max_num_seqs=3)
    checked = start(scheduler, job, policy)
    waiting = [scheduler.add(one) for one in requests_of(job)]
    for request in waiting:
        request.longest = 30
    while len(checked.in_flight) < 3:
        scheduler.step()
    withdrawn = sorted(checked.in_flight)
    scheduler.control.withdraw(withdrawn, withdrawn)

    while not any(waiting[seq].status == "preempted" for seq in withdrawn):
        assert scheduler.running, "nobody was preempted"
        scheduler.step()

    preempted = next(seq for seq in withdrawn if waiting[seq].status == "preempted")
    assert preempted not in scheduler.control.upcoming(8)
    started = set()
    while checked.num_waiting or scheduler.running:
        started |= set(scheduler.step()[0])
    assert preempted not in started
    assert scheduler.free == scheduler.limits.num_blocks
    for request in list(scheduler.requests.values()):
        scheduler.abort(request)
    assert scheduler.queue.is_idle()


def test_what_is_withdrawn_while_it_waits_has_ended_where_it_had_started():
    job = random_job(7, num_requests=8, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(num_blocks=14, max_num_seqs=3)
    checked = start(scheduler, job)
    waiting = [scheduler.add(one) for one in requests_of(job)]
    for request in waiting:
        request.longest = 30
    while not checked.num_preempted:
        scheduler.step()
    scheduler.queue.take_counts()
    (preempted,) = checked._preempted
    never_started = next(one for one in range(8) if waiting[one].status == "waiting")

    scheduler.control.withdraw([preempted, never_started], [preempted, never_started])

    assert scheduler.queue.take_counts()[1] == 1


def test_a_run_begins_once_vllm_has_let_go_of_the_one_before(monkeypatch):
    job = random_job(7, num_requests=1, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler()
    start(scheduler, job)
    running = scheduler.add(requests_of(job)[0])
    scheduler.step()
    scheduler.abort(running)
    slept = []

    def take_the_next_step(duration_s):
        slept.append(duration_s)
        scheduler.step()

    monkeypatch.setattr("time.sleep", take_the_next_step)
    scheduler.control.start("fcfs", job.plan())

    assert len(slept) == 1
    assert scheduler.queue.is_idle()


def test_what_comes_late_of_a_run_that_is_over_does_not_start_in_the_next():
    job = random_job(7, num_requests=2, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler()
    start(scheduler, job)
    # It had ended, and the run did not know yet.
    scheduler.control.withdraw([0, 1], [0])
    checked = start(scheduler, job)
    late = scheduler.add(FakeRequest(1, job.prompts[1], 5))
    assert scheduler.step()[0] == []
    for request in requests_of(job, run=2):
        request.request_id += "y"
        scheduler.add(request)

    while checked.num_waiting or scheduler.running:
        scheduler.step()

    assert sorted(checked.admissions) == [0, 1]
    assert late.status == "waiting"
    scheduler.abort(late)
    assert scheduler.queue.is_idle()


def test_a_run_does_not_begin_beside_one_that_vllm_does_not_let_go_of(monkeypatch):
    job = random_job(7, num_requests=2, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler()
    start(scheduler, job)
    scheduler.add(requests_of(job)[0])
    monkeypatch.setattr("blend_core.engines.vllm.control._LET_GO_S", 0.0)

    with pytest.raises(EngineError, match="an earlier run after 0 s; open the engine anew"):
        scheduler.control.start("fcfs", job.plan())


def test_a_released_request_is_unknown_to_the_policy_no_more_than_before():
    job = random_job(7, num_requests=6, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(max_num_seqs=1)
    checked = start(scheduler, job, order=[0, 1, 2, 3, 4, 5])
    waiting = [scheduler.add(one) for one in requests_of(job)]
    waiting[0].longest = 30
    scheduler.step()

    assert scheduler.control.release([0, 3, 4]) == (3, 4)

    assert len(scheduler.queue) == 5, "vLLM still has it"
    for request in (waiting[3], waiting[4]):
        scheduler.abort(request)
    assert checked.num_waiting == 5
    for seq in (3, 4):
        scheduler.add(FakeRequest(seq, job.prompts[seq], job.output_tokens[seq]))
    run_all_seqs = set()
    while checked.num_waiting or scheduler.running:
        run_all_seqs |= set(scheduler.step()[0])
    assert run_all_seqs == set(range(6))


def test_prompt_tokens_stay_within_the_policys_budget():
    job = random_job(8, num_requests=30, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(num_blocks=60, max_num_batched_tokens=24)
    checked = start(scheduler, job, "dual_scan")
    for request in requests_of(job):
        scheduler.add(request)

    run_all(scheduler, job, checked)

    assert all(used <= budget for used, budget in zip(scheduler.prefilled, scheduler.budgets, strict=True))


def test_preempted_requests_come_first_on_their_side():
    job = random_job(9, num_requests=10, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(num_blocks=40)
    checked = start(scheduler, job, "dual_scan")
    for request in requests_of(job):
        request.longest = 40
        scheduler.add(request)
    while not checked.num_preempted:
        scheduler.step()
    (seq, side) = next(iter(checked._preempted.items()))
    assert side in Side
    assert seq in scheduler.control.upcoming(2)


def test_counts_of_steps_add_up_over_preemptions():
    job = random_job(10, num_requests=24, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(num_blocks=14)
    checked = start(scheduler, job)
    for request in requests_of(job):
        scheduler.add(request)
    prefill = recomputed = decode = 0
    while checked.num_waiting or scheduler.running:
        _, counts = scheduler.step()
        if counts is not None:
            prefill += counts.num_prefill_tokens
            recomputed += counts.num_recomputed_tokens
            decode += counts.num_decode_tokens

    assert checked.num_preempted > 0
    assert prefill - recomputed == sum(map(len, job.prompts))
    assert decode == sum(job.output_tokens) - len(job.prompts)


def test_a_request_that_vllm_passes_over_is_not_asked_for_in_vain():
    job = random_job(2, num_requests=4, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(skips={"0-x"})
    start(scheduler, job, order=[0, 1, 2, 3], kind=WaitingForItsHead)
    for request in requests_of(job):
        scheduler.add(request)

    scheduler.step()

    assert not scheduler.queue.take_counts()[2]


def test_that_the_policy_asked_for_a_request_that_is_not_there_is_told_once():
    job = random_job(3, num_requests=4, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(num_blocks=60)
    first, *_ = start(scheduler, job, kind=WaitingForItsHead).upcoming(4)
    queue = scheduler.queue
    for request in requests_of(job):
        if seq_of(request) != first:
            scheduler.add(request)
    assert not queue.take_counts()[2]

    scheduler.step()

    assert queue.take_counts()[2]
    assert not queue.take_counts()[2]


def test_what_was_withdrawn_on_its_way_does_not_start_though_nothing_else_runs():
    job = random_job(7, num_requests=1, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler()
    start(scheduler, job)
    scheduler.control.withdraw([0], [0])
    late = scheduler.add(requests_of(job)[0])

    assert scheduler.step()[0] == []
    assert late.status == "waiting"
    assert len(scheduler.queue) == 1, "vLLM still has it"


def test_what_was_withdrawn_in_one_run_is_a_request_like_others_in_the_next():
    job = random_job(7, num_requests=8, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(num_blocks=14, max_num_seqs=3)
    start(scheduler, job)
    for request in requests_of(job):
        request.longest = 30
        scheduler.add(request)
    scheduler.step()
    scheduler.control.withdraw(range(8), range(8))
    for request in list(scheduler.requests.values()):
        scheduler.abort(request)
    scheduler.queue.reconcile(scheduler.finished_ids)
    assert scheduler.queue.is_idle()

    checked = start(scheduler, job, kind=Heard)
    again = requests_of(job, run=2)
    for request in again:
        request.request_id += "y"
        request.longest = 30
        scheduler.add(request)
    run_all(scheduler, job, checked)

    assert checked.num_preempted > 0
    assert checked.answers == dict.fromkeys(range(8), 30)


def test_a_request_is_told_as_admitted_once_and_not_let_go_of_after_a_preemption():
    job = random_job(7, num_requests=8, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(num_blocks=14, max_num_seqs=3)
    checked = start(scheduler, job)
    for request in requests_of(job):
        request.longest = 30
        scheduler.add(request)
    while not checked.num_preempted:
        scheduler.step()
    assert scheduler.control.release(list(checked._preempted)) == ()

    while checked.num_waiting or scheduler.running:
        scheduler.step()

    assert sorted(scheduler.admitted) == list(range(8))


def test_blocks_that_prompts_in_flight_will_take_are_not_free():
    job = random_job(7, num_requests=1, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler(num_blocks=20, max_num_batched_tokens=8)
    start(scheduler, job)
    scheduler.add(FakeRequest(0, range(32), 4))
    for num_given in (2, 4, 6, 8):
        scheduler.step()
        assert scheduler.free == 20 - num_given
        assert scheduler.queue.num_free_blocks == 20 - 8


def test_a_policy_prepares_once_a_step_that_computes_something():
    job = random_job(7, num_requests=1, block_size=BLOCK_SIZE)
    scheduler = FakeScheduler()
    checked = start(scheduler, job, kind=Preparing)
    scheduler.step()
    assert checked.num_prepared == 0
    (request,) = requests_of(job)
    request.longest = 3
    scheduler.add(request)
    for _ in range(5):
        scheduler.step()
    assert checked.num_prepared == 3
