"""Signs of life for the ranks of a run, so that their shards stay theirs."""

import logging
import threading
from types import TracebackType
from typing import Self

from blend_core.errors import StorageError
from flows.stages.shared_plan import LEASE_S, SharedPlan
from flows.stopping import thread_end_s
from storage.database import Database
from storage.ownership import Run
from storage.shards import extend_leases

HEARTBEAT_INTERVAL_S = 15.0

logger = logging.getLogger(__name__)


class LeaseHeartbeat:
    """Extends the leases of all ranks that are not given up, from a thread, as a context manager."""

    __slots__ = ("_db", "_ended", "_run", "_shared", "_thread")

    def __init__(self, db: Database, run: Run, shared: SharedPlan) -> None:
        """Extends nothing yet."""
        self._db = db
        self._run = run
        self._shared = shared
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"shards-{run.run_id}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(thread_end_s(error))

    def _keep(self) -> None:
        while not self._ended.wait(HEARTBEAT_INTERVAL_S):
            try:
                extend_leases(self._db, self._run, self._shared.live_ranks, lease_s=LEASE_S)
            except StorageError as error:
                # A run that is stale learns so from its own lease, and a database comes back.
                logger.warning("The leases of shards could not be extended: %s", error)
