"""A watchdog over an engine: one that tells nothing for long is ended, so that its requests run again."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from blend_core.engines.base import EngineEvent

_LONGEST_POLL_S = 1.0


class StallWatch:
    """Calls `end_engine` when an event is waited for too long, as a context manager with a thread of its own.

    An engine tells something at least every window, about a second. One that is silent for minutes hangs, in
    its device or in a policy, and would keep its job from ever ending.
    """

    __slots__ = ("_clock", "_end_engine", "_ended", "_limit_s", "_silent_s", "_thread", "_waiting_since_s")

    def __init__(
        self, limit_s: Callable[[], float], end_engine: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        """Watches nothing yet.

        Args:
            limit_s: says how long a silence may be now; asked again and again, since it may change.
            end_engine: called from the watching thread, at most once.
            clock: rising seconds.
        """
        self._limit_s = limit_s
        self._end_engine = end_engine
        self._clock = clock
        self._waiting_since_s: float | None = None
        self._silent_s: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def silent_s(self) -> float | None:
        """For how long the engine had told nothing when it was ended for that; None where it was not."""
        return self._silent_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for the engine, once."""
        self._waiting_since_s = self._clock()
        try:
            yield
        finally:
            self._waiting_since_s = None

    def excuse(self) -> None:
        """What the engine was silent for until now does not count: it waits for what it asked for."""
        if self._waiting_since_s is not None:
            self._waiting_since_s = self._clock()

    def watched(self, events: Iterator[EngineEvent]) -> Iterator[EngineEvent]:
        """The same events. Time that their reader takes does not count as waiting."""
        while True:
            with self.waiting():
                event = next(events, None)
            if event is None:
                return
            yield event

    def _watch(self) -> None:
        while not self._ended.wait(min(self._limit_s() / 10, _LONGEST_POLL_S)):
            since_s = self._waiting_since_s
            if since_s is None:
                continue
            silent_s = self._clock() - since_s
            if silent_s > self._limit_s():
                self._silent_s = silent_s
                self._end_engine()
                return
