"""A run shown in Prefect: log lines, and a progress artifact that is written from a thread of its own."""

import contextvars
import logging
import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from blend_core.engines.base import StepWindow
from flows.progress import BatchRates

ARTIFACT_INTERVAL_S = 2.0
_LAST_WRITE_S = 5.0

RunLogger = logging.Logger | logging.LoggerAdapter[Any]


class ProgressArtifact:
    """Shows the latest percentage that it was given. Calls return at once.

    Prefect's client tries for a minute to reach a server that is away; the engine's events must not wait for
    that. What cannot be written is a line in the log and nothing more.
    """

    __slots__ = ("_artifact_id", "_changed", "_is_ending", "_latest", "_logger", "_thread")

    def __init__(self, logger: RunLogger) -> None:
        self._logger = logger
        self._artifact_id: UUID | None = None
        self._latest: tuple[float, str] | None = None
        self._is_ending = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def show(self, percent: float, description: str) -> None:
        """Takes the place of what was not written yet."""
        with self._changed:
            self._latest = (percent, description)
            self._changed.notify_all()
        if self._thread is None:
            # Prefect finds the run that an artifact belongs to in the caller's context.
            work = contextvars.copy_context().run
            self._thread = threading.Thread(
                target=work, args=(self._work,), name="progress-artifact", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """Waits a few seconds for the last write; nothing is written after that. Idempotent."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LAST_WRITE_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._latest is not None or self._is_ending)
                latest, self._latest = self._latest, None
            if latest is None:
                return
            self._write(*latest)

    def _write(self, percent: float, description: str) -> None:
        try:
            if self._artifact_id is None:
                artifact_id = create_progress_artifact(percent, key="progress", description=description)
                assert isinstance(artifact_id, UUID), "called outside of an event loop"
                self._artifact_id = artifact_id
            else:
                update_progress_artifact(self._artifact_id, percent, description=description)
        except Exception as error:
            self._logger.warning("The progress artifact cannot be written (%s).", type(error).__name__)


class PrefectProgress:
    """Shows a run as log lines and one progress artifact. A Prefect that does not answer never disturbs the
    run.

    The artifact is there from the first stage on; its bar is the share of requests that have ended.
    """

    __slots__ = ("_artifact", "_clock", "_logger", "_next_at_s", "_rates", "_share", "_stage")

    def __init__(self, logger: RunLogger, clock: Callable[[], float]) -> None:
        """`clock` gives rising seconds."""
        self._logger = logger
        self._clock = clock
        self._artifact = ProgressArtifact(logger)
        self._next_at_s = clock()
        self._rates = BatchRates()
        self._share: float | None = None
        self._stage = ""

    def stage_started(self, stage: str, detail: str) -> None:
        """Logs a line and shows it beside the bar."""
        self._stage = stage
        self._logger.info("%s: %s", stage, detail)
        self._show(f"{stage}: {detail}")

    def stage_finished(self, stage: str, detail: str) -> None:
        """Logs a line; that of the last stage stays beside the bar."""
        self._logger.info("%s: done, %s", stage, detail)
        if stage == "report":
            # A job in which nothing had to run is done, too.
            self._share = 1.0 if self._share is None else self._share
            self._show(detail)

    def counted(self, num_done: int, num_total: int | None) -> None:
        """Moves the bar, at most once every `ARTIFACT_INTERVAL_S`."""
        if num_total:
            self._share = num_done / num_total
        if self._clock() < self._next_at_s:
            return
        if num_total:
            line = f"{num_done / num_total:.0%}, {num_done:,} of {num_total:,} requests, {self._rates.line()}"
            self._show(line.removesuffix(", "))
        else:
            self._show(f"{self._stage}: {num_done:,} lines and rows so far")

    def window(self, window: StepWindow, rank: int) -> None:
        """Keeps the rates for the next move."""
        self._rates.add(window, rank)

    def note(self, message: str) -> None:
        """Logs a line."""
        self._logger.info("%s", message)

    def _show(self, description: str) -> None:
        self._next_at_s = self._clock() + ARTIFACT_INTERVAL_S
        self._artifact.show(100.0 * (self._share or 0.0), description)

    def end(self) -> None:
        """Waits a moment for what is still to be shown."""
        self._artifact.end()
