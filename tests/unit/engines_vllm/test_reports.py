"""When steps are told."""

import pytest

from blend_core.engines.vllm.flight import StepCounts
from blend_core.engines.vllm.reports import LONGEST_WAIT_S, STEPS_AT_ONCE, CountedStep, Stepped, StepReports

COUNTS = StepCounts(5, 3, 0, 25, 30, 0)


@pytest.fixture
def told():
    return []


@pytest.fixture
def reports(told):
    return StepReports(told.append)


def stepped(number=0, *, started_at=0.0, asked_in_vain=False):
    step = CountedStep(1, number, started_at, COUNTS, 0, 0.5, 1, 2, 0)
    return Stepped(step, 0.001, 0, 0.0001, 0.0001, asked_in_vain)


def test_steps_are_told_together_and_in_order(reports, told):
    steps = [stepped(number) for number in range(STEPS_AT_ONCE + 1)]
    for step in steps:
        reports.add(step)
        reports.tell_due()
    assert told == [steps[:-1]]


def test_a_step_is_told_no_sooner_than_there_is_time_for_it(reports, told):
    for number in range(STEPS_AT_ONCE):
        reports.add(stepped(number))
    assert not told
    reports.tell_due()
    assert len(told) == 1


def test_no_step_waits_for_long(reports, told):
    steps = [stepped(), stepped(started_at=LONGEST_WAIT_S)]
    reports.add(steps[0])
    reports.tell_due()
    assert not told
    reports.add(steps[1])
    reports.tell_due()
    assert told == [steps]


def test_that_something_was_missing_is_told_as_soon_as_there_is_time(reports, told):
    reports.add(stepped(asked_in_vain=True))
    reports.add(stepped())
    assert not told
    reports.tell_due()
    reports.add(stepped())
    reports.tell_due()
    assert [len(steps) for steps in told] == [2]


def test_what_waits_is_told_when_it_is_asked_for_and_not_twice(reports, told):
    reports.add(stepped())
    reports.tell_all()
    reports.tell_all()
    assert told == [[stepped()]]
