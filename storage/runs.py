"""Runs: one attempt at executing a job, held by a lease and numbered by a fencing number."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import sqlalchemy as sa

from blend_core.errors import StorageError
from storage.database import Database
from storage.ids import new_id
from storage.job_status import JobStatus
from storage.jobs import unknown_job
from storage.ownership import Run, hold_job, stale_run
from storage.postgres_text import clean_text
from storage.schema import batch_job, run


class RunStatus(StrEnum):
    """States of a run; all but RUNNING are final."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class JobNow:
    """What a run learns of its job when it extends its lease.

    Attributes:
        status: its state; CANCELLING asks the run to stop soon.
        is_overdue: whether its completion window has closed, by the database's clock: the one that set it.
    """

    status: JobStatus
    is_overdue: bool


@dataclass(frozen=True, slots=True)
class LatestRun:
    """The run that a job had last, or has now.

    Attributes:
        run_id: the run.
        engine: name of its engine.
        policy: its admission policy.
        status: its state.
        error: why it ended; None where it goes on or ended well. One that was told to end has a reason, too.
    """

    run_id: str
    engine: str
    policy: str
    status: RunStatus
    error: str | None


def is_held() -> sa.ColumnElement[bool]:
    """Whether a run whose lease lasts executes the job; for a statement that selects from `batch_job`."""
    return (
        sa.select(run.c.run_id)
        .where(
            run.c.job_id == batch_job.c.job_id,
            run.c.status == RunStatus.RUNNING.value,
            run.c.lease_expires_at > sa.func.clock_timestamp(),
        )
        .exists()
    )


def start_run(
    db: Database, job_id: str, *, engine: str, policy: str, details: dict[str, str], lease_s: float
) -> Run:
    """Takes the job for a new run. A run whose lease has ended is marked lost and its writes are refused
    from now on.

    Raises:
        StorageError: the job has ended, or another run's lease is live; then `ids["lease_left_s"]` says for
            how many whole seconds, rounded up.
    """
    with db.connect() as connection:
        locked = sa.select(batch_job.c.status).where(batch_job.c.job_id == job_id).with_for_update()
        status = connection.execute(locked).scalar_one_or_none()
        if status is None:
            raise unknown_job(job_id)
        if JobStatus(status).is_end:
            raise StorageError(f"Job {job_id} has ended as {status}; submit a new job.", job_id=job_id)
        left = sa.extract("epoch", run.c.lease_expires_at - sa.func.clock_timestamp())
        live = connection.execute(
            sa.select(run.c.run_id, sa.func.ceil(left)).where(
                run.c.job_id == job_id, run.c.status == "running"
            )
        ).one_or_none()
        if live is not None and live[1] > 0:
            raise StorageError(
                f"Run {live[0]} holds job {job_id} for {live[1]} s more, or as long as it works; wait.",
                job_id=job_id,
                run_id=live[0],
                lease_left_s=int(live[1]),
            )
        if live is not None:
            connection.execute(
                sa.update(run)
                .where(run.c.run_id == live[0])
                .values(status=RunStatus.LOST.value, finished_at=sa.func.clock_timestamp())
            )
        run_id = new_id("run")
        number = connection.execute(
            sa.update(batch_job)
            .where(batch_job.c.job_id == job_id)
            .values(current_run_id=run_id, fencing_number=batch_job.c.fencing_number + 1)
            .returning(batch_job.c.fencing_number)
        ).scalar_one()
        connection.execute(
            sa.insert(run).values(
                run_id=run_id,
                job_id=job_id,
                fencing_number=number,
                engine=engine,
                policy=policy,
                details=details,
                lease_expires_at=_lease_end(lease_s),
            )
        )
    return Run(run_id=run_id, job_id=job_id, fencing_number=number)


def heartbeat(db: Database, the_run: Run, *, lease_s: float) -> JobNow:
    """Extends the lease and returns how the job stands.

    Raises:
        StaleRunError: another run took over, or this one has ended.
    """
    is_overdue = sa.func.coalesce(batch_job.c.expires_at <= sa.func.clock_timestamp(), sa.false())
    renewed = (
        sa.update(run)
        .where(run.c.run_id == the_run.run_id, run.c.status == "running", batch_job.c.job_id == run.c.job_id)
        .values(heartbeat_at=sa.func.clock_timestamp(), lease_expires_at=_lease_end(lease_s))
        .returning(batch_job.c.status, is_overdue)
    )
    with db.connect() as connection:
        row = connection.execute(renewed).one_or_none()
    if row is None:
        raise stale_run(the_run)
    return JobNow(JobStatus(row[0]), row[1])


WAITS_FOR: Final = "waits_for"
"""Of a run's details: the sentence that says what it waits for; empty when it waits no longer."""


def set_run_details(db: Database, the_run: Run, details: dict[str, str]) -> None:
    """Merges facts that are known only after the engine is open (versions, limits) into the run's details.

    Raises:
        StaleRunError: the run no longer owns its job.
    """
    merged = run.c.details.op("||")(sa.cast(details, run.c.details.type))
    with db.connect() as connection:
        hold_job(connection, the_run)
        connection.execute(sa.update(run).where(run.c.run_id == the_run.run_id).values(details=merged))


def finish_run(db: Database, the_run: Run, status: RunStatus, *, error_message: str | None = None) -> None:
    """Ends the run and sets the job free. A run that has ended or was taken over stays as it is."""
    message = None if error_message is None else clean_text(error_message)[0]
    with db.connect() as connection:
        connection.execute(
            sa.update(run)
            .where(run.c.run_id == the_run.run_id, run.c.status == "running")
            .values(status=status.value, finished_at=sa.func.clock_timestamp(), error_message=message)
        )


def latest_run(db: Database, job_id: str) -> LatestRun | None:
    """The run that a job had last, or has now; None before the first."""
    statement = (
        sa.select(run.c.run_id, run.c.engine, run.c.policy, run.c.status, run.c.error_message)
        .where(run.c.job_id == job_id)
        .order_by(run.c.fencing_number.desc())
        .limit(1)
    )
    with db.connect() as connection:
        row = connection.execute(statement).one_or_none()
    if row is None:
        return None
    return LatestRun(row.run_id, row.engine, row.policy, RunStatus(row.status), row.error_message)


def latest_run_id(db: Database, job_id: str) -> str | None:
    """Id of the run that a job had last, or has now; None before the first."""
    latest = latest_run(db, job_id)
    return None if latest is None else latest.run_id


def _lease_end(lease_s: float) -> sa.ColumnElement[object]:
    return sa.func.clock_timestamp() + sa.func.make_interval(0, 0, 0, 0, 0, 0, lease_s)
