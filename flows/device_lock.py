"""One engine run at a time on a device: a lock held by a database session, whoever starts the run."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
from psycopg import sql

from blend_core.errors import BlendError, RunInterruptedError, StorageUnavailableError
from flows.stopping import StopReason, StopSignal, thread_end_s
from storage.database import Database, storage_error

POLL_INTERVAL_S = 1.0
CHECK_INTERVAL_S = 2.0
GIVE_UP_AFTER_S = 600.0

logger = logging.getLogger(__name__)

_HOLDER_QUERY = """
SELECT activity.application_name
FROM pg_locks AS lock JOIN pg_stat_activity AS activity USING (pid)
WHERE lock.locktype = 'advisory' AND lock.granted AND lock.objsubid = 1
  AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (lock.classid::bigint << 32) | lock.objid::bigint = %(key)s
"""


@contextmanager
def device_lock(
    db: Database,
    *,
    device: str,
    job_id: str,
    stop: StopSignal,
    waiting: Callable[[str], None],
) -> Iterator[bool]:
    """Holds a device for one engine run and yields whether it was got: False when asked to stop while
    waiting.

    The lock belongs to a database session of its own. It ends with the block, or with this process, however
    that dies. A session that is lost is replaced, in the wait and in the block; where another run took the
    device before that, this run is told to stop. Runs that record to different databases do not see one
    another.

    Args:
        db: where the lock is held.
        device: what is locked; name host and device.
        job_id: who holds it, for others to read.
        stop: ends the wait; told where the device is lost to another run.
        waiting: called once, if another run holds the device, with a sentence that says which.

    Raises:
        StorageError: the database refused.
        StorageUnavailableError: it did not answer for `GIVE_UP_AFTER_S` of the wait.
        RunInterruptedError: at the end of the block, which was stopped since another run took the device.
    """
    session = _LockSession(db, device, job_id)
    try:
        held = _wait(session, stop, waiting)
        if not held:
            yield False
            return
        with _watched(session, stop):
            yield True
    finally:
        # Closing the session is what gives the lock back, here and in a process that dies.
        session.close()
    if session.taken_by is not None and stop.reason is StopReason.INTERRUPTED:
        raise RunInterruptedError(
            f"The database lost this run's hold on {device}, and {session.taken_by} took it; "
            f"run job {job_id} again to continue it.",
            job_id=job_id,
        )


def _wait(session: "_LockSession", stop: StopSignal, waiting: Callable[[str], None]) -> bool:
    told = False
    away_since_s: float | None = None
    while True:
        try:
            if session.take():
                return True
            if not told:
                waiting(f"Waiting for {session.device}: {session.holder() or 'another run'} runs on it.")
                told = True
            away_since_s = None
        except StorageUnavailableError as error:
            now_s = time.monotonic()
            away_since_s = now_s if away_since_s is None else away_since_s
            if now_s - away_since_s >= GIVE_UP_AFTER_S:
                raise
            logger.warning("Waiting for %s goes on: %s", session.device, error)
        if stop.wait(POLL_INTERVAL_S):
            return False


@contextmanager
def _watched(session: "_LockSession", stop: StopSignal) -> Iterator[None]:
    """Looks after the lock from a thread until the block ends."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(CHECK_INTERVAL_S):
            try:
                session.keep()
            except BlendError as error:
                logger.warning("The hold on %s could not be checked: %s", session.device, error)
            if session.taken_by is not None:
                stop.request(StopReason.INTERRUPTED)
                return

    thread = threading.Thread(target=watch, name="device-lock", daemon=True)
    thread.start()
    ending: BaseException | None = None
    try:
        yield
    except BaseException as error:
        ending = error
        raise
    finally:
        ended.set()
        thread.join(thread_end_s(ending))


class _LockSession:
    """The session that holds a device's lock, for one thread at a time. Its errors are the platform's own.

    Attributes:
        device: what is locked.
        taken_by: who took the device after this session was lost; None while nobody did.
    """

    __slots__ = ("_connection", "_db", "_key", "_name", "device", "taken_by")

    def __init__(self, db: Database, device: str, job_id: str) -> None:
        self.device = device
        self.taken_by: str | None = None
        self._db = db
        self._key = _lock_key(device)
        self._name = f"blend engine of {job_id}"[:63]
        self._connection: psycopg.Connection | None = None

    def take(self) -> bool:
        """Tries to lock the device, in a new session where there is none."""
        return bool(self._ask("SELECT pg_try_advisory_lock(%(key)s)"))

    def holder(self) -> str | None:
        """Who holds the lock."""
        name = self._ask(_HOLDER_QUERY)
        return str(name) if name else None

    def keep(self) -> None:
        """Takes the lock again if its session was lost, or sets `taken_by` if another run was faster."""
        if self._connection is not None:
            try:
                self._ask("SELECT 1")
                return
            except StorageUnavailableError:
                logger.warning("The session that holds %s was lost.", self.device)
        if self.take():
            return
        holder = self.holder()
        # Our own name: the server has not noticed yet that the old session is gone, so nobody else has the
        # lock. No name: it has just become free.
        if holder is not None and holder != self._name:
            self.taken_by = holder
        self.close()

    def close(self) -> None:
        """Ends the session, and the lock with it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, query: str) -> object:
        """The first value of the answer, None without one. After an error the session is closed."""
        try:
            if self._connection is None:
                self._connection = self._db.open_raw()
                self._connection.autocommit = True
                self._connection.execute(sql.SQL("SET application_name = {}").format(sql.Literal(self._name)))
            row = self._connection.execute(query, {"key": self._key}).fetchone()
        except psycopg.Error as error:
            self.close()
            raise storage_error(error, self._db.safe_url) from error
        return None if row is None else row[0]


def _lock_key(device: str) -> int:
    """A positive 63-bit number, since that is how the two halves of an advisory key read back."""
    digest = hashlib.sha256(f"blend engine on {device}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
