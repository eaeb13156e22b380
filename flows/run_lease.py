"""Keeps a run's lease while its stages work, and passes on what the database says about the job."""

import logging
import threading
from collections.abc import Callable
from datetime import datetime
from types import TracebackType
from typing import Self

from blend_core.errors import StaleRunError, StorageUnavailableError
from flows.stopping import StopReason, StopSignal
from storage.database import Database
from storage.jobs import JobStatus
from storage.runs import Run, heartbeat

logger = logging.getLogger(__name__)

LEASE_S = 30.0
HEARTBEAT_INTERVAL_S = 2.0


class RunLease:
    """Extends a run's lease from a thread of its own, as a context manager.

    What it learns goes to the stop signal: a cancelled job, a completion window that closed, a run that was
    taken over. A database that does not answer for a while is no reason to stop: the lease says when it is.
    """

    __slots__ = ("_clock", "_db", "_ended", "_expires_at", "_run", "_stop", "_thread")

    def __init__(
        self,
        db: Database,
        run: Run,
        stop: StopSignal,
        *,
        expires_at: datetime | None,
        clock: Callable[[], datetime],
    ) -> None:
        """`clock` tells the time as `expires_at` does (aware)."""
        self._db = db
        self._run = run
        self._stop = stop
        self._expires_at = expires_at
        self._clock = clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease-{run.run_id}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._ended.wait(HEARTBEAT_INTERVAL_S):
            self.check()

    def check(self) -> None:
        """Extends the lease once and looks at the job and the clock."""
        if self._expires_at is not None and self._clock() >= self._expires_at:
            self._stop.request(StopReason.EXPIRED)
        try:
            status = heartbeat(self._db, self._run, lease_s=LEASE_S)
        except StaleRunError:
            self._stop.request(StopReason.LOST)
        except StorageUnavailableError as error:
            logger.warning("Run %s could not extend its lease and tries again: %s", self._run.run_id, error)
        else:
            if status is JobStatus.CANCELLING:
                self._stop.request(StopReason.CANCELLED)
