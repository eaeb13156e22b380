"""One engine run at a time on a device: a lock held by a database session, whoever starts the run."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import psycopg
from psycopg import sql

from flows.stopping import StopSignal
from storage.database import Database

POLL_INTERVAL_S = 1.0

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
    that dies. Runs that record to different databases do not see one another.

    Args:
        db: where the lock is held.
        device: what is locked; name host and device.
        job_id: who holds it, for others to read.
        stop: ends the wait.
        waiting: called once, if another run holds the device, with a sentence that says which.
    """
    key = _lock_key(device)
    # Closing the session is what gives the lock back, here and in a process that dies.
    with closing(db.open_raw()) as connection:
        connection.autocommit = True
        connection.execute(
            sql.SQL("SET application_name = {}").format(sql.Literal(f"blend engine of {job_id}"[:63]))
        )
        told = False
        while not _try_lock(connection, key):
            if not told:
                waiting(f"Waiting for {device}: {_holder(connection, key)} runs on it.")
                told = True
            if stop.wait(POLL_INTERVAL_S):
                yield False
                return
        yield True


def _lock_key(device: str) -> int:
    """A positive 63-bit number, since that is how the two halves of an advisory key read back."""
    digest = hashlib.sha256(f"blend engine on {device}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _try_lock(connection: psycopg.Connection, key: int) -> bool:
    row = connection.execute("SELECT pg_try_advisory_lock(%s)", (key,)).fetchone()
    return row is not None and bool(row[0])


def _holder(connection: psycopg.Connection, key: int) -> str:
    row = connection.execute(_HOLDER_QUERY, {"key": key}).fetchone()
    return str(row[0]) if row is not None and row[0] else "another run"
