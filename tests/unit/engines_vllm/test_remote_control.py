"""Calls and reports between a run and a scheduler, each at its end of a connection."""

import sys
import tempfile
import threading
from collections import deque
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))

from cases import random_job

from blend_core.engines.vllm.admission_log import AdmissionLog
from blend_core.engines.vllm.flight import Flight, StepCounts
from blend_core.engines.vllm.remote_control import RemoteControl, StepSender, admission_file, serve_calls
from blend_core.engines.vllm.reports import STEPS_AT_ONCE, Admitted, CountedStep, Stepped
from blend_core.errors import ConfigurationError, EngineDiedError, PlanError
from blend_core.policies.base import LEFT
from tests.unit.engines_vllm.fakes import BLOCK_SIZE, FakeRequest, FakeScheduler

STEP = Stepped(
    CountedStep(1, 0, 0.0, StepCounts(5, 3, 0, 25, 30, 0), 0, 0.5, 1, 2, 0), 0.001, 0, 0.0, 0.0, False
)


class Ends:
    """Both ends, in this process.

    Attributes:
        run: the run's.
        scheduler: what the calls go to.
        admissions: where the scheduler tells admissions.
        steps: how it tells steps.
    """

    def __init__(self):
        self.run = RemoteControl(16)
        self.scheduler = FakeScheduler()
        self.admissions = AdmissionLog(admission_file(self.run.address))
        self.steps = StepSender(self.run.address)
        serve_calls(self.run.address, self.scheduler.control)
        self.run.accept()


@pytest.fixture
def ends():
    both = Ends()
    yield both
    both.run.close()


def test_nothing_is_on_disk_once_the_scheduler_has_connected(ends):
    assert not Path(ends.run.address).parent.exists()


def test_nothing_is_on_disk_where_it_never_connects():
    run = RemoteControl(16)
    run.close()
    run.close()
    assert not Path(run.address).parent.exists()


def test_a_folder_whose_name_leaves_no_room_for_sockets_is_told(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", f"/{'x' * 70}")
    with pytest.raises(ConfigurationError, match=r"at most (55|51) characters"):
        RemoteControl(16)


def test_calls_are_answered(ends):
    job = random_job(3, num_requests=6, block_size=BLOCK_SIZE)
    assert ends.run.limits() == ends.scheduler.limits
    ends.run.start("fcfs", job.plan(list(range(6))))
    assert ends.run.upcoming(3) == [0, 1, 2]
    for seq in range(3):
        ends.scheduler.add(FakeRequest(seq, job.prompts[seq], 5))
    ends.run.withdraw([0, 5], [0])
    assert ends.run.upcoming(9) == [1, 2, 3, 4]
    assert ends.run.release([1, 4]) == (1,)
    ends.run.revise(job.plan([4, 3, 2, 1], revision=1))
    assert ends.run.upcoming(2) == [4, 3]


def test_a_call_that_is_refused_says_why(ends):
    job = random_job(3, num_requests=2, block_size=2 * BLOCK_SIZE)
    with pytest.raises(PlanError, match=f"blocks of {2 * BLOCK_SIZE}"):
        ends.run.start("fcfs", job.plan())


def test_reports_come_admissions_first(ends):
    ends.steps([STEP, STEP])
    ends.admissions.write(Admitted((4, 2), 0))
    assert list(ends.run.reports()) == [Admitted((4, 2), 0), STEP, STEP]
    assert list(ends.run.reports()) == []


def test_steps_are_told_when_they_are_asked_for(ends):
    ends.scheduler.reports.add(STEP)
    ends.run.tell_all()
    assert ends.scheduler.told == [[STEP]]


def test_a_scheduler_that_is_gone_has_its_reports_read_to_the_end(ends):
    ends.steps([STEP])
    ends.admissions.write(Admitted((7,), 1))
    ends.steps._connection.close()

    read = []
    with pytest.raises(EngineDiedError, match="engine core ended"):
        deque(map(read.append, ends.run.reports(1.0)))

    assert read == [Admitted((7,), 1), STEP]


def test_a_run_that_outlives_its_engine_is_told_so(ends):
    ends.run.close()
    with pytest.raises(EngineDiedError, match="engine core ended"):
        ends.run.withdraw([0], [0])
    with pytest.raises(EngineDiedError, match="engine core ended"):
        list(ends.run.reports())


def test_there_is_room_for_all_steps_that_are_told_together_while_nobody_reads(ends):
    """A run that asks for the last steps reads them when its call is answered."""
    steps = [
        STEP._replace(step=STEP.step._replace(counts=counts_of_prompts(2_000))) for _ in range(STEPS_AT_ONCE)
    ]
    sender = threading.Thread(target=ends.steps, args=(steps,), daemon=True)
    sender.start()
    sender.join(10.0)
    assert not sender.is_alive()
    assert deque(ends.run.reports()) == deque(steps)


def counts_of_prompts(num_prompts):
    """Of a step that completes so many."""
    flight = Flight(BLOCK_SIZE)
    for seq in range(num_prompts):
        request = FakeRequest(seq, range(8), 10)
        flight.admit(seq, request, LEFT, 0)
        request.num_computed_tokens = 8
    scheduled = {f"{seq}-x": 8 for seq in range(num_prompts)}
    completed, counts = flight.advance(scheduled, 8 * num_prompts)
    assert len(completed) == num_prompts
    return counts
