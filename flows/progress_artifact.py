"""Prefect's progress artifact of a run, written from a thread of its own."""

import contextvars
import logging
import threading
from typing import Any
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

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
