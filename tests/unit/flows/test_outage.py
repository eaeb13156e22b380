"""Work goes on after a service was away, and gives up in the end."""

from collections.abc import Callable

import pytest

from blend_core.errors import SourceUnavailableError, StorageError, StorageUnavailableError
from flows.outage import GIVE_UP_AFTER_S, LONGEST_DELAY_S, through_outages
from flows.stopping import StopReason, StopSignal


class Clock:
    """Rises by what is slept and worked."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.delays_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, delay_s: float) -> bool:
        self.delays_s.append(delay_s)
        self.now_s += delay_s
        return False


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stop(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> StopSignal:
    monkeypatch.setattr(StopSignal, "wait", lambda self, timeout_s: clock.sleep(timeout_s))
    return StopSignal()


def failing(clock: Clock, num_times: int, error: Exception, work_s: float = 0.0) -> Callable[[], str]:
    """Work that fails some times first."""
    left = [error] * num_times

    def work() -> str:
        clock.now_s += work_s
        if left:
            raise left.pop()
        return "done"

    return work


@pytest.mark.parametrize("kind", [StorageUnavailableError, SourceUnavailableError])
def test_work_is_done_again_until_the_service_is_back_and_told_once(
    clock: Clock, stop: StopSignal, kind: type[Exception]
) -> None:
    notes: list[str] = []

    value = through_outages(failing(clock, 5, kind("Away.")), stop, notes.append, clock=clock)

    assert value == "done"
    assert clock.delays_s == [0.5, 1.0, 2.0, 4.0, 5.0]
    assert notes == ["Away. It is tried again, for 10 minutes."]


def test_an_error_that_another_try_does_not_mend_passes_through(clock: Clock, stop: StopSignal) -> None:
    with pytest.raises(StorageError, match="Refused"):
        through_outages(failing(clock, 1, StorageError("Refused.")), stop, print, clock=clock)
    assert clock.delays_s == []


def test_a_service_that_stays_away_is_given_up_in_the_end(clock: Clock, stop: StopSignal) -> None:
    with pytest.raises(StorageUnavailableError):
        through_outages(failing(clock, 10_000, StorageUnavailableError("Away.")), stop, str, clock=clock)
    assert GIVE_UP_AFTER_S <= clock.now_s < GIVE_UP_AFTER_S + 2 * LONGEST_DELAY_S


def test_work_that_comes_further_between_outages_is_never_given_up(clock: Clock, stop: StopSignal) -> None:
    notes: list[str] = []
    work = failing(clock, 30, StorageUnavailableError("Away."), work_s=60.0)
    num_minutes = lambda: int(clock.now_s / 60)  # noqa: E731

    assert through_outages(work, stop, notes.append, clock=clock, how_far=num_minutes) == "done"
    assert clock.now_s > GIVE_UP_AFTER_S
    assert len(notes) == 30


def test_work_that_fails_after_a_long_time_again_and_again_is_given_up(
    clock: Clock, stop: StopSignal
) -> None:
    notes: list[str] = []
    work = failing(clock, 10_000, StorageUnavailableError("Away."), work_s=240.0)

    with pytest.raises(StorageUnavailableError):
        through_outages(work, stop, notes.append, clock=clock)
    assert clock.now_s < GIVE_UP_AFTER_S + 3 * 240.0
    assert len(notes) == 1


def test_a_process_that_is_told_to_end_does_not_wait(clock: Clock, stop: StopSignal) -> None:
    stop.request(StopReason.INTERRUPTED)

    with pytest.raises(StorageUnavailableError):
        through_outages(failing(clock, 1, StorageUnavailableError("Away.")), stop, str, clock=clock)
    assert clock.delays_s == []


def test_a_cancelled_job_is_still_settled_when_the_service_is_back(clock: Clock, stop: StopSignal) -> None:
    stop.request(StopReason.CANCELLED)
    work = failing(clock, 2, StorageUnavailableError("Away."))

    assert through_outages(work, stop, str, clock=clock, sleep=clock.sleep) == "done"
    assert clock.delays_s == [0.5, 1.0]
