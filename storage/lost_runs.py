"""Runs that have not ended as far as the database knows; those of processes known to be dead are freed."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from storage.database import Database
from storage.runs import RunStatus
from storage.schema import run


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that has not ended, as far as the database knows.

    Attributes:
        run_id: the run.
        details: its details, those of its holder among them.
        started_at: when it took the job.
        heartbeat_age_s: seconds since its last sign of life, by the database's clock.
        lease_left_s: seconds until another run may take the job; below 0 when it may.
    """

    run_id: str
    details: Mapping[str, str]
    started_at: datetime
    heartbeat_age_s: float
    lease_left_s: float


def live_run(db: Database, job_id: str) -> LiveRun | None:
    """The run that executes a job, or None; its lease may have ended."""
    now = sa.func.clock_timestamp()
    statement = sa.select(
        run.c.run_id,
        run.c.details,
        run.c.started_at,
        sa.extract("epoch", now - run.c.heartbeat_at),
        sa.extract("epoch", run.c.lease_expires_at - now),
    ).where(run.c.job_id == job_id, run.c.status == RunStatus.RUNNING.value)
    with db.connect() as connection:
        row = connection.execute(statement).one_or_none()
    return None if row is None else LiveRun(*row[:3], float(row[3]), float(row[4]))


def mark_lost(db: Database, run_id: str) -> None:
    """Ends a run as lost; its writes are refused from then on. An ended run stays as it is."""
    with db.connect() as connection:
        connection.execute(
            sa.update(run)
            .where(run.c.run_id == run_id, run.c.status == RunStatus.RUNNING.value)
            .values(status=RunStatus.LOST.value, finished_at=sa.func.clock_timestamp())
        )
