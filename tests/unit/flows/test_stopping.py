import os
import signal
import threading
from collections.abc import Iterator

import pytest

from flows.stopping import (
    StopReason,
    StopSignal,
    stop_at_signals,
    stopped_by_signals,
    told_when_stopped,
)


def test_the_first_reason_counts() -> None:
    stop = StopSignal()
    assert stop.reason is None
    assert not stop.wait(0)

    stop.request(StopReason.EXPIRED)
    stop.request(StopReason.CANCELLED)

    assert stop.reason is StopReason.EXPIRED
    assert stop.wait(0)


def test_what_is_asked_of_a_process_stops_its_jobs_and_wakes_them() -> None:
    process = StopSignal()
    before = StopSignal(process)
    threading.Timer(0.05, process.request, [StopReason.INTERRUPTED]).start()

    assert before.wait(30)
    after = StopSignal(process)
    assert after.wait(0)
    after.request(StopReason.EXPIRED)
    assert before.reason is after.reason is StopReason.INTERRUPTED


def test_what_is_asked_of_a_job_stops_neither_its_process_nor_other_jobs() -> None:
    process = StopSignal()
    job, other = StopSignal(process), StopSignal(process)

    job.request(StopReason.EXPIRED)
    assert job.wait(0)
    assert process.reason is None
    assert other.reason is None
    assert not other.wait(0)

    process.request(StopReason.CANCELLED)
    assert (job.reason, other.reason) == (StopReason.EXPIRED, StopReason.CANCELLED)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_told_and_does_not_end_the_process(number: signal.Signals) -> None:
    told: list[signal.Signals] = []

    with stopped_by_signals(told.append):
        os.kill(os.getpid(), number)

    assert told == [number]


def test_a_second_interrupt_ends_the_process_the_usual_way() -> None:
    told: list[signal.Signals] = []

    def be_told_twice() -> None:
        with stopped_by_signals(told.append):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        be_told_twice()

    assert told == [signal.SIGTERM]


def test_earlier_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    with stopped_by_signals(lambda number: None):
        assert signal.getsignal(signal.SIGTERM) != before[1]

    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("handlers")
def test_a_process_that_only_tells_what_came_of_it_is_ended_by_no_signal(number: signal.Signals) -> None:
    with stop_at_signals(ends_process=True) as stop:
        pass
    os.kill(os.getpid(), number)

    assert stop.reason is None
    assert signal.getsignal(number) is signal.SIG_IGN


@pytest.mark.usefixtures("handlers")
def test_a_run_that_failed_leaves_signals_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(OSError, match="gone"), stop_at_signals(ends_process=True):
        raise OSError("gone")

    assert signal.getsignal(signal.SIGTERM) == before


def test_an_interrupt_cancels_and_sigterm_does_what_was_asked_for() -> None:
    for number, on_sigterm, reason in (
        (signal.SIGINT, StopReason.INTERRUPTED, StopReason.CANCELLED),
        (signal.SIGTERM, StopReason.INTERRUPTED, StopReason.INTERRUPTED),
        (signal.SIGTERM, StopReason.CANCELLED, StopReason.CANCELLED),
    ):
        with stop_at_signals(on_sigterm) as stop:
            os.kill(os.getpid(), number)
        assert stop.reason is reason


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGINT, StopReason.CANCELLED), (signal.SIGTERM, StopReason.INTERRUPTED)],
)
def test_a_stop_is_told_at_once_and_not_by_the_signal_handler(
    number: signal.Signals, reason: StopReason
) -> None:
    told: list[tuple[StopReason, bool]] = []
    is_told = threading.Event()

    def tell(why: StopReason) -> None:
        told.append((why, threading.current_thread() is threading.main_thread()))
        is_told.set()

    with stop_at_signals() as stop, told_when_stopped(stop, tell):
        os.kill(os.getpid(), number)
        assert is_told.wait(10)
    assert told == [(reason, False)]


def test_a_block_that_nothing_stops_tells_nothing_and_leaves_no_thread() -> None:
    told: list[StopReason] = []
    before = threading.active_count()
    with told_when_stopped(StopSignal(), told.append):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert told == []


def test_outside_of_the_main_thread_handlers_stay_as_they_are() -> None:
    before = signal.getsignal(signal.SIGTERM)
    inside: list[object] = []

    def run() -> None:
        with stopped_by_signals(lambda number: None):
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert inside == [before]
