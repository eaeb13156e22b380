"""Runs that have not ended as far as the database knows, those that are dead, and jobs that nothing runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import sqlalchemy as sa

from storage.database import Database
from storage.job_status import JobStatus
from storage.runs import RunStatus, is_held
from storage.schema import batch_job, run

JUST_MADE: Final = timedelta(minutes=1)
"""Age up to which a job counts as just made: whoever made it is about to begin it or to hand it to Prefect,
which takes seconds."""


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that has not ended, as far as the database knows.

    Attributes:
        run_id: the run.
        job_id: the job that it holds.
        details: its details, those of its holder among them.
        started_at: when it took the job.
        heartbeat_age_s: seconds since its last sign of life, by the database's clock.
        lease_left_s: seconds until another run may take the job; below 0 when it may.
    """

    run_id: str
    job_id: str
    details: Mapping[str, str]
    started_at: datetime
    heartbeat_age_s: float
    lease_left_s: float


def live_run(db: Database, job_id: str) -> LiveRun | None:
    """The run that executes a job, or None; its lease may have ended."""
    found = _live_runs(db, run.c.job_id == job_id)
    return found[0] if found else None


def live_runs(db: Database) -> list[LiveRun]:
    """The runs whose leases last, the oldest first."""
    return _live_runs(db, run.c.lease_expires_at > sa.func.clock_timestamp())


def _live_runs(db: Database, which: sa.ColumnElement[bool]) -> list[LiveRun]:
    now = sa.func.clock_timestamp()
    statement = (
        sa.select(
            run.c.run_id,
            run.c.job_id,
            run.c.details,
            run.c.started_at,
            sa.cast(sa.extract("epoch", now - run.c.heartbeat_at), sa.Float),
            sa.cast(sa.extract("epoch", run.c.lease_expires_at - now), sa.Float),
        )
        .where(run.c.status == RunStatus.RUNNING.value, which)
        .order_by(run.c.started_at, run.c.run_id)
    )
    with db.connect() as connection:
        return [LiveRun(*row) for row in connection.execute(statement)]


@dataclass(frozen=True, slots=True)
class StoppedJob:
    """A job that has not ended and that nothing runs.

    Attributes:
        job_id: the job.
        name: its name.
        status: where it stands.
        has_failed: whether its latest run failed.
    """

    job_id: str
    name: str
    status: str
    has_failed: bool


def stopped_jobs(db: Database) -> list[StoppedJob]:
    """Jobs that were begun, have not ended and are held by no run whose lease lasts; the oldest first."""
    return _unended_jobs(db, batch_job.c.current_run_id.is_not(None), ~is_held())


def unbegun_jobs(db: Database) -> list[StoppedJob]:
    """Jobs that have not ended and that no run has begun; the oldest first. They may be queued.

    Those that were just made are left out, by the database's clock.
    """
    is_new = batch_job.c.created_at > sa.func.clock_timestamp() - JUST_MADE
    return _unended_jobs(db, batch_job.c.current_run_id.is_(None), ~is_new)


def _unended_jobs(db: Database, *which: sa.ColumnElement[bool]) -> list[StoppedJob]:
    # By a name of its own: `is_held` looks for any run of the job.
    latest = run.alias("latest")
    statement = (
        sa.select(
            batch_job.c.job_id,
            batch_job.c.name,
            batch_job.c.status,
            sa.func.coalesce(latest.c.status == RunStatus.FAILED.value, sa.false()),
        )
        .outerjoin_from(batch_job, latest, latest.c.run_id == batch_job.c.current_run_id)
        .where(batch_job.c.status.in_([status.value for status in JobStatus if not status.is_end]), *which)
        .order_by(batch_job.c.created_at, batch_job.c.job_id)
    )
    with db.connect() as connection:
        return [StoppedJob(*row) for row in connection.execute(statement)]


def mark_lost(db: Database, run_id: str) -> None:
    """Ends a run as lost; its writes are refused from then on. An ended run stays as it is."""
    with db.connect() as connection:
        connection.execute(
            sa.update(run)
            .where(run.c.run_id == run_id, run.c.status == RunStatus.RUNNING.value)
            .values(status=RunStatus.LOST.value, finished_at=sa.func.clock_timestamp())
        )
