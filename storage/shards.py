"""Shards of a plan and the leases of the ranks that hold them.

A rank holds a shard until its requests have ended, another rank takes over what it has not started, or it is
given up. Results name the lease that they were computed under; those of a lease that is not held any more are
refused (`storage.run_rows`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import LiteralString

import psycopg

from blend_core.errors import StorageError
from storage.database import Database
from storage.ownership import Run, hold_job


@dataclass(frozen=True, slots=True)
class NewShard:
    """A shard that is cut now, for a rank.

    Attributes:
        rank: who gets it.
        num_requests: requests in it, one at least.
        estimated_work_s: `compute_s + memory_s` of them; None in a run of one rank.
    """

    rank: int
    num_requests: int
    estimated_work_s: float | None


@dataclass(frozen=True, slots=True)
class Lease:
    """What a rank must name to write results of a shard.

    Attributes:
        revision: plan revision that the shard was cut from.
        shard_index: its number.
        rank: who holds it, or held it last.
        fencing_number: rises when the lease is taken from a rank.
    """

    revision: int
    shard_index: int
    rank: int
    fencing_number: int


_NEXT_INDEX = """
SELECT coalesce(max(shard_index), -1) + 1 FROM shard
WHERE job_id = %(job_id)s AND run_id = %(run_id)s AND revision = %(revision)s
"""
_INSERT = """
INSERT INTO shard (job_id, run_id, revision, shard_index, status, rank, num_requests, estimated_work_s,
                   lease_expires_at)
VALUES (%(job_id)s, %(run_id)s, %(revision)s, %(shard_index)s, 'leased', %(rank)s, %(num_requests)s,
        %(work_s)s, clock_timestamp() + make_interval(secs => %(lease_s)s))
"""
_EMPTY = """
DELETE FROM shard
WHERE job_id = %(job_id)s AND run_id = %(run_id)s AND revision = %(revision)s
  AND shard_index = %(shard_index)s AND fencing_number = %(fencing_number)s AND status <> 'done'
  AND num_requests = %(num_taken)s
"""
_SHRINK = """
UPDATE shard SET num_requests = num_requests - %(num_taken)s,
    status = CASE WHEN num_ended = num_requests - %(num_taken)s THEN 'done' ELSE status END,
    done_at = CASE WHEN num_ended = num_requests - %(num_taken)s THEN clock_timestamp() END
WHERE job_id = %(job_id)s AND run_id = %(run_id)s AND revision = %(revision)s
  AND shard_index = %(shard_index)s AND fencing_number = %(fencing_number)s AND status <> 'done'
"""
_EXTEND = """
UPDATE shard SET heartbeat_at = clock_timestamp(),
    lease_expires_at = clock_timestamp() + make_interval(secs => %(lease_s)s)
WHERE job_id = %(job_id)s AND run_id = %(run_id)s AND status = 'leased' AND rank = ANY(%(ranks)s)
"""
_RELEASE = """
UPDATE shard SET status = 'waiting', fencing_number = fencing_number + 1, lease_expires_at = NULL
WHERE job_id = %(job_id)s AND run_id = %(run_id)s AND rank = %(rank)s AND status IN ('leased', 'waiting')
RETURNING revision, shard_index, rank, fencing_number
"""
# Where every lease has run out, not a rank but all signs of life stayed away: the next one comes soon.
_RELEASE_EXPIRED = """
UPDATE shard SET status = 'waiting', fencing_number = fencing_number + 1, lease_expires_at = NULL
WHERE job_id = %(job_id)s AND run_id = %(run_id)s AND status = 'leased'
  AND lease_expires_at < clock_timestamp()
  AND EXISTS (SELECT FROM shard other WHERE other.job_id = %(job_id)s AND other.run_id = %(run_id)s
              AND other.status = 'leased' AND other.lease_expires_at >= clock_timestamp())
RETURNING revision, shard_index, rank, fencing_number
"""
_HELD = """
SELECT revision, shard_index, rank, fencing_number FROM shard
WHERE job_id = %(job_id)s AND run_id = %(run_id)s AND status = 'leased'
"""
_COUNT_ENDED = """
UPDATE shard s SET num_ended = s.num_ended + e.num,
    status = CASE WHEN s.num_ended + e.num = s.num_requests THEN 'done' ELSE s.status END,
    done_at = CASE WHEN s.num_ended + e.num = s.num_requests THEN clock_timestamp() END
FROM unnest(%(revisions)s::int[], %(indexes)s::int[], %(nums)s::bigint[]) AS e (revision, shard_index, num)
WHERE s.job_id = %(job_id)s AND s.run_id = %(run_id)s AND s.revision = e.revision
  AND s.shard_index = e.shard_index
"""


def deal_shards(
    db: Database,
    run: Run,
    revision: int,
    new: Sequence[NewShard],
    *,
    lease_s: float,
    shrunk: Sequence[tuple[Lease, int]] = (),
) -> list[Lease]:
    """Leases shards that are cut now to their ranks, and takes their requests out of the shards they were in.

    Args:
        db: the platform's tables.
        run: the run.
        revision: plan revision that they are cut from.
        new: the shards.
        lease_s: how long the leases last unless they are extended.
        shrunk: shards that requests are taken from, and how many.

    Returns:
        The leases of `new`, in order.

    Raises:
        StaleRunError: the run no longer owns its job; nothing is changed.
        StorageError: a shard of `shrunk` is held under another lease by now; nothing is changed.
    """
    values = {"job_id": run.job_id, "run_id": run.run_id, "revision": revision, "lease_s": lease_s}
    with db.raw() as connection:
        hold_job(connection, run)
        # Before a shard goes: a number that a late writer may still name is not given again.
        row = connection.execute(_NEXT_INDEX, values).fetchone()
        assert row is not None
        for lease, num_taken in shrunk:
            _shrink(connection, run, lease, num_taken)
        leases = [Lease(revision, row[0] + place, shard.rank, 1) for place, shard in enumerate(new)]
        rows = [
            {
                **values,
                "shard_index": lease.shard_index,
                "rank": shard.rank,
                "num_requests": shard.num_requests,
                "work_s": shard.estimated_work_s,
            }
            for lease, shard in zip(leases, new, strict=True)
        ]
        with connection.cursor() as cursor:
            cursor.executemany(_INSERT, rows)
    return leases


def forget_shards(db: Database, run: Run) -> None:
    """Removes shards of the job that are not done: those of dead runs, and of this one's earlier tries.

    Raises:
        StaleRunError: the run no longer owns its job.
    """
    with db.raw() as connection:
        hold_job(connection, run)
        connection.execute("DELETE FROM shard WHERE job_id = %s AND status <> 'done'", (run.job_id,))


def extend_leases(db: Database, run: Run, ranks: Sequence[int], *, lease_s: float) -> None:
    """Gives a sign of life for ranks: what they hold stays theirs.

    Raises:
        StaleRunError: the run no longer owns its job.
    """
    with db.raw() as connection:
        hold_job(connection, run)
        connection.execute(
            _EXTEND,
            {"job_id": run.job_id, "run_id": run.run_id, "lease_s": lease_s, "ranks": list(ranks)},
        )


def release_rank(db: Database, run: Run, rank: int) -> list[Lease]:
    """Takes every lease from a rank that is given up; what it writes late is refused. Safe to repeat.

    Returns:
        What waits now, with the fencing numbers that it waits under.

    Raises:
        StaleRunError: the run no longer owns its job.
    """
    return _release(db, run, _RELEASE, {"rank": rank})


def release_expired(db: Database, run: Run) -> list[Lease]:
    """Takes the leases that have run out from their ranks, while others' have not; see `release_rank`."""
    return _release(db, run, _RELEASE_EXPIRED, {})


def held_leases(connection: psycopg.Connection, run: Run, leases: set[Lease]) -> set[Lease]:
    """Those of the leases that are held right now; the run holds its job's row lock."""
    if not leases:
        return set()
    rows = connection.execute(_HELD, {"job_id": run.job_id, "run_id": run.run_id})
    return leases & {Lease(*row) for row in rows}


def count_ended(connection: psycopg.Connection, run: Run, num_ended: dict[Lease, int]) -> None:
    """Counts new results into their shards; one whose last request has ended is done."""
    if not num_ended:
        return
    connection.execute(
        _COUNT_ENDED,
        {
            "job_id": run.job_id,
            "run_id": run.run_id,
            "revisions": [lease.revision for lease in num_ended],
            "indexes": [lease.shard_index for lease in num_ended],
            "nums": list(num_ended.values()),
        },
    )


def _release(db: Database, run: Run, statement: LiteralString, values: dict[str, int]) -> list[Lease]:
    with db.raw() as connection:
        hold_job(connection, run)
        rows = connection.execute(statement, {"job_id": run.job_id, "run_id": run.run_id, **values})
        return [Lease(*row) for row in rows]


def _shrink(connection: psycopg.Connection, run: Run, lease: Lease, num_taken: int) -> None:
    """Takes requests out of a shard; one that keeps none is gone, one whose others have ended is done."""
    values = {
        "job_id": run.job_id,
        "run_id": run.run_id,
        "revision": lease.revision,
        "shard_index": lease.shard_index,
        "fencing_number": lease.fencing_number,
        "num_taken": num_taken,
    }
    emptied = connection.execute(_EMPTY, values).rowcount
    if not emptied and not connection.execute(_SHRINK, values).rowcount:
        raise StorageError(
            f"Shard {lease.shard_index} of run {run.run_id} is not held as it was; run the job again.",
            run_id=run.run_id,
        )
