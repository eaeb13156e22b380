"""Why a run stops before its job is done, who may ask for it, and how the stages learn of it."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from types import FrameType


class StopReason(StrEnum):
    """Why a run stops early. The first reason given counts."""

    CANCELLED = "cancelled"
    """The job was cancelled: what has no result becomes `cancelled`."""
    EXPIRED = "expired"
    """The completion window closed: what has no result becomes `expired`."""
    INTERRUPTED = "interrupted"
    """The process was told to end: nothing is written off, the next run continues the job."""
    LOST = "lost"
    """Another run took the job over: this one must not write any more."""


class StopSignal:
    """Tells what runs to stop. Any thread or signal handler may set it; it is never unset.

    A process that runs several jobs has one signal for itself and a child of it for each job: what is asked
    of the process holds for every job, what is asked of a job holds for that one alone.

    Args:
        parent: stops this one, too; its reason counts where this one has none of its own.
    """

    __slots__ = ("_children", "_event", "_parent", "_reason")

    def __init__(self, parent: "StopSignal | None" = None) -> None:
        self._event = threading.Event()
        self._reason: StopReason | None = None
        self._parent = parent
        self._children: list[StopSignal] = []
        if parent is not None:
            # In this order, so that a reason which is given right now is not slept through.
            parent._children.append(self)
            if parent.reason is not None:
                self._event.set()

    @property
    def reason(self) -> StopReason | None:
        """Why to stop, or None to go on. Cheap."""
        if self._reason is None and self._parent is not None:
            return self._parent.reason
        return self._reason

    def request(self, reason: StopReason) -> None:
        """Asks to stop; a later reason changes nothing."""
        if self.reason is None:
            self._reason = reason
            self._wake()

    def _wake(self) -> None:
        self._event.set()
        for child in self._children:
            child._wake()

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until a stop is asked for or the time is over; returns whether to stop."""
        return self._event.wait(timeout_s)


def thread_end_s(error: BaseException | None) -> float | None:
    """How long a block that ends with `error` waits for its threads: None for as long as they take.

    A process that is being ended (KeyboardInterrupt) waits a moment only: a thread may hang on a database
    that is away.
    """
    return None if error is None or isinstance(error, Exception) else 2.0


@contextmanager
def told_when_stopped(stop: StopSignal, tell: Callable[[StopReason], None]) -> Iterator[None]:
    """Calls `tell` with the reason, from a thread, as soon as a stop is asked for within the block.

    A signal handler may set a `StopSignal` and must not print: it may have broken into a print.
    """
    over = StopSignal(stop)

    def wait() -> None:
        over.wait(threading.TIMEOUT_MAX)
        if stop.reason is not None:
            tell(stop.reason)

    thread = threading.Thread(target=wait, name="stop-told", daemon=True)
    thread.start()
    try:
        yield
    finally:
        # Wakes the thread where nothing else did.
        over.request(StopReason.LOST)
        thread.join(2.0)


@contextmanager
def stop_at_signals(
    on_sigterm: StopReason = StopReason.INTERRUPTED, *, ends_process: bool = False
) -> Iterator[StopSignal]:
    """The first SIGINT stops as CANCELLED, the first SIGTERM as `on_sigterm`; see `stopped_by_signals`."""
    stop = StopSignal()

    def on_signal(number: signal.Signals) -> None:
        stop.request(StopReason.CANCELLED if number is signal.SIGINT else on_sigterm)

    with stopped_by_signals(on_signal, ends_process=ends_process):
        yield stop


@contextmanager
def stopped_by_signals(
    on_signal: Callable[[signal.Signals], None], *, ends_process: bool = False
) -> Iterator[None]:
    """Calls `on_signal` at the first SIGINT or SIGTERM; a second one ends the process the usual way.

    Outside of the main thread, where Python allows no signal handlers, nothing is installed. Earlier handlers
    are put back at the end. Where nothing but the end of the process follows (`ends_process`) and the block
    raised nothing, both signals are ignored from there on instead: what came of the block is told and becomes
    the exit status, also while Python shuts down.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    afterwards = dict(previous)

    def handle(number: int, frame: FrameType | None) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_DFL if each == signal.SIGTERM else signal.default_int_handler)
        on_signal(signal.Signals(number))

    for number in previous:
        signal.signal(number, handle)
    try:
        yield
        if ends_process:
            afterwards = dict.fromkeys(previous, signal.SIG_IGN)
    finally:
        for number, handler in afterwards.items():
            signal.signal(number, handler)
