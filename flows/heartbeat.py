"""Something that a run does again and again beside its work, in a thread."""

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from flows.stopping import thread_end_s

logger = logging.getLogger(__name__)


class Heartbeat:
    """Calls `beat` every `interval_s` seconds from a thread of its own, as a context manager.

    A beat that fails is a line in the log and the next one comes: a run whose signs of life ended for good
    would lose its job while it works on.

    The end of the block waits for a beat under way, but not for long where the process is being ended.
    """

    __slots__ = ("_beat", "_ended", "_interval_s", "_thread")

    def __init__(self, name: str, interval_s: float, beat: Callable[[], None]) -> None:
        """Calls nothing yet.

        Args:
            name: of the thread.
            interval_s: from the end of a beat to the next; the first one comes after as long.
            beat: what is done; its errors end this beat alone.
        """
        self._interval_s = interval_s
        self._beat = beat
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(thread_end_s(error))

    def _keep(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self._beat()
            except Exception:
                logger.exception("A beat of %s failed", self._thread.name)
