"""When a run asks what comes next, and what of it vLLM is given."""

import random
import sys
from itertools import islice
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))

from cases import random_job

from blend_core.engines.vllm.request_window import LOOK_EVERY_STEPS, RequestWindow
from blend_core.policies.factory import make_policy
from tests.unit.engines_vllm.fakes import BLOCK_SIZE, FakeRequest, FakeScheduler

NUM_REQUESTS = 60


class Setting:
    """A job under `fcfs` on the fake scheduler, two in flight: a look wants four, and fetches eight.

    Attributes:
        num_looks: times that the policy was asked what comes next.
    """

    def __init__(self, *, order=None, max_num_seqs=2):
        self.job = random_job(4, num_requests=NUM_REQUESTS, block_size=BLOCK_SIZE)
        self.scheduler = FakeScheduler(num_blocks=200, max_num_seqs=max_num_seqs)
        self.num_looks = 0
        self.policy = make_policy("fcfs", self.job.plan(order), self.scheduler.limits)
        self.scheduler.queue.start(self.policy, 0)
        self.window = RequestWindow(self, self.abort, max_num_seqs)
        self.control = self.scheduler.control

    def upcoming(self, num_requests):
        self.num_looks += 1
        return self.control.upcoming(num_requests)

    def release(self, seqs):
        return self.control.release(seqs)

    def abort(self, request_ids):
        for request_id in request_ids:
            self.scheduler.abort(self.scheduler.requests[f"{request_id}-x"])

    def feed(self):
        """Queues what is missing; returns it, look by look."""
        fetched = []
        for missing in self.window.missing(NUM_REQUESTS):
            fetched.append(missing)
            for seq in missing:
                self.queue(seq)
        return fetched

    def queue(self, seq):
        self.window.queued[seq] = self.scheduler.add(FakeRequest(seq, self.job.prompts[seq], 100))

    def step(self):
        """A step of the scheduler and the run's part of it; returns whether the policy asked in vain."""
        self.window.step()
        self.scheduler.step()
        self.window.start(self.scheduler.admitted, 0.0, 0)
        self.scheduler.admitted = ()
        return self.scheduler.queue.take_counts()[2]


@pytest.fixture
def setting():
    return Setting(order=list(range(NUM_REQUESTS)))


@pytest.fixture
def running(setting):
    """Two run, and nothing changes for a while."""
    setting.feed()
    setting.step()
    setting.feed()
    setting.num_looks = 0
    return setting


def test_twice_as_many_as_a_look_wants_are_fetched_at_once(setting):
    assert setting.feed() == [list(range(8))]


def test_while_requests_run_and_wait_nobody_asks_what_comes_next(running):
    for _ in range(LOOK_EVERY_STEPS - 1):
        assert running.feed() == []
        assert not running.step()
    assert running.num_looks == 0
    running.step()

    running.feed()

    assert running.num_looks > 0


def test_as_many_starts_as_may_be_in_flight_are_followed_by_a_look(running):
    running.window.start([2], 0.0, 0)
    running.feed()
    assert running.num_looks == 0
    running.window.start([3], 0.0, 0)

    running.feed()

    assert running.num_looks > 0


def test_a_revision_or_a_question_in_vain_is_followed_by_a_look(running):
    running.window.look_again()

    running.feed()

    assert running.num_looks > 0


def test_as_long_as_nothing_runs_every_step_is_followed_by_a_look(setting):
    setting.feed()
    setting.num_looks = 0
    for number in range(1, 4):
        setting.window.step()
        setting.feed()
        assert setting.num_looks == number


def test_what_the_policy_asks_for_in_vain_is_queued_after_the_step(running):
    """Another order comes into force, and what it names first is not here."""
    later = running.job.plan([*range(40, NUM_REQUESTS), *range(40)], revision=1)
    running.policy.revise(later)
    for seq in (0, 1):
        running.scheduler.abort(running.scheduler.requests[f"{seq}-x"])
    assert running.feed() == []

    assert running.step()
    running.window.look_again()

    assert running.feed()[0][0] == 40


def test_all_that_were_fetched_may_fail_and_the_next_ones_come(setting):
    fetched = []
    for missing in setting.window.missing(NUM_REQUESTS):
        fetched.append(missing)
        for seq in missing:
            if seq < 8:
                setting.policy.finished(seq, 0)
            else:
                setting.queue(seq)

    assert fetched == [list(range(8)), list(range(8, 16))]


def test_what_is_not_due_any_more_is_let_go_of_so_that_the_window_stays_bounded(setting):
    for seq in range(20, 37):
        setting.queue(seq)
    assert len(setting.window) == 17

    setting.feed()

    assert sorted(setting.window.queued) == list(range(8))
    assert len(setting.scheduler.queue) == 8


def test_nothing_is_looked_at_once_all_that_is_left_is_here(setting):
    setting.queue(0)

    assert list(setting.window.missing(1)) == []
    assert setting.num_looks == 0


class StartsAtOnce:
    """A scheduler that starts most of what it is given at once, of which nobody hears before `heard`."""

    def __init__(self, share):
        self.generator = random.Random(0)
        self.share = share
        self.waiting = dict.fromkeys(range(2_000))
        self.unheard = []

    def upcoming(self, num_requests):
        return list(islice(self.waiting, num_requests))

    def release(self, seqs):
        return ()

    def start(self, queued):
        for seq in queued:
            if seq in self.waiting and self.generator.random() <= self.share:
                del self.waiting[seq]
                self.unheard.append(seq)

    def heard(self):
        heard, self.unheard = self.unheard, []
        return heard


@pytest.mark.parametrize("share", [0.6, 0.9, 1.0])
def test_no_more_is_handed_over_than_one_fetch_before_starts_are_heard_of(share):
    scheduler = StartsAtOnce(share)
    window = RequestWindow(scheduler, lambda ids: None, max_num_seqs=16)
    num_left = 2_000
    for _ in range(2_000):
        for missing in window.missing(num_left):
            window.queued.update((seq, seq) for seq in missing)
            scheduler.start(missing)
        assert len(window.queued) <= 12 * 16
        window.step()
        scheduler.start(window.queued)
        for seq in window.start(scheduler.heard(), 0.0, 0):
            window.forget(seq)
            num_left -= 1
    assert num_left == 0
