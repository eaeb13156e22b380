"""A watchdog over an engine: one that tells nothing for long is ended, so that its requests run again."""

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from blend_core.engines.base import EngineEvent


class StallWatch:
    """Calls `end_engine` when an event is waited for too long, as a context manager with a thread of its own.

    An engine tells something at least every window, about a second. One that is silent for minutes hangs, in
    its device or in a policy, and would keep its job from ever ending.
    """

    __slots__ = ("_clock", "_end_engine", "_ended", "_limit_s", "_thread", "_waiting_since_s")

    def __init__(self, limit_s: float, end_engine: Callable[[], None], clock: Callable[[], float]) -> None:
        """`clock` gives rising seconds; `end_engine` is called from the watching thread, at most once."""
        self._limit_s = limit_s
        self._end_engine = end_engine
        self._clock = clock
        self._waiting_since_s: float | None = None
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

    def watched(self, events: Iterator[EngineEvent]) -> Iterator[EngineEvent]:
        """The same events. Time that their reader takes does not count as waiting."""
        while True:
            self._waiting_since_s = self._clock()
            try:
                event = next(events, None)
            finally:
                self._waiting_since_s = None
            if event is None:
                return
            yield event

    def _watch(self) -> None:
        while not self._ended.wait(self._limit_s / 10):
            since_s = self._waiting_since_s
            if since_s is not None and self._clock() - since_s > self._limit_s:
                self._end_engine()
                return
