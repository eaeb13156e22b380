"""Batch jobs: create, read, and move between OpenAI Batch's states."""

from dataclasses import dataclass, fields
from datetime import date, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from blend_core.errors import ConfigurationError, StorageError
from storage.database import Database
from storage.ids import new_id
from storage.job_status import JobStatus
from storage.ownership import Run, hold_job
from storage.postgres_text import clean_text, unstorable_text
from storage.schema import batch_job
from storage.schema import run as run_table


@dataclass(frozen=True, slots=True)
class Job:
    """One row of `batch_job`; the comments on its columns say what each is."""

    job_id: str
    name: str
    status: JobStatus
    model: str
    spec: dict[str, Any]
    idempotency_key: str | None
    created_at: datetime
    in_progress_at: datetime | None
    finalizing_at: datetime | None
    cancelling_at: datetime | None
    finished_at: datetime | None
    expires_at: datetime | None
    ingested_at: datetime | None
    num_total: int
    num_succeeded: int
    num_errored: int
    num_expired: int
    num_cancelled: int
    error_message: str | None
    output_uri: str | None
    error_uri: str | None
    current_run_id: str | None
    fencing_number: int
    table_uri: str | None
    logical_date: date
    nightly: str | None
    write_back: dict[str, Any] | None

    @property
    def write_back_error(self) -> str | None:
        """Why not every result is in the user's table; None where all are, or none was asked."""
        return None if self.write_back is None else self.write_back["error"]


def create_job(
    db: Database,
    *,
    name: str,
    model: str,
    spec: dict[str, Any],
    completion_window_s: float | None = None,
    idempotency_key: str | None = None,
    logical_date: date | None = None,
    nightly: str | None = None,
) -> str:
    """Writes a job in state validating and returns its id.

    The same `idempotency_key` again returns the job it made first, whatever the other arguments say.
    `logical_date` is the day that the job is about, by default today (UTC); `nightly` names the nightly job
    of which it is one night.

    Raises:
        ConfigurationError: model, spec or key have a character that the database cannot hold. They are not
            cleaned as answers are: a cleaned key or query would be another one.
    """
    for value, what in ((model, "model"), (idempotency_key, "idempotency key"), (spec, "spec")):
        place = unstorable_text(value, what)
        if place is not None:
            raise ConfigurationError(
                f"The job's {place} has a NUL character or half a surrogate pair; remove it."
            )
    expires_at = None
    if completion_window_s is not None:
        expires_at = sa.func.clock_timestamp() + sa.func.make_interval(0, 0, 0, 0, 0, 0, completion_window_s)
    statement = (
        insert(batch_job)
        .values(
            job_id=new_id("job"),
            name=clean_text(name)[0],
            model=model,
            spec=spec,
            idempotency_key=idempotency_key,
            expires_at=expires_at,
            nightly=nightly,
            **({} if logical_date is None else {"logical_date": logical_date}),
        )
        .on_conflict_do_nothing(index_elements=["idempotency_key"])
        .returning(batch_job.c.job_id)
    )
    with db.connect() as connection:
        job_id = connection.execute(statement).scalar_one_or_none()
        if job_id is None:
            job_id = connection.execute(_of_key(idempotency_key)).scalar_one()
    return str(job_id)


def job_of_key(db: Database, idempotency_key: str) -> str | None:
    """Id of the job that was made with this key, or None, as for a key that the database cannot hold."""
    if unstorable_text(idempotency_key, "idempotency key") is not None:
        return None
    with db.connect() as connection:
        job_id = connection.execute(_of_key(idempotency_key)).scalar_one_or_none()
    return None if job_id is None else str(job_id)


def _of_key(idempotency_key: str | None) -> sa.Select[tuple[str]]:
    return sa.select(batch_job.c.job_id).where(batch_job.c.idempotency_key == idempotency_key)


def get_job(db: Database, job_id: str) -> Job:
    """Raises `StorageError` for an unknown id."""
    with db.connect() as connection:
        row = connection.execute(sa.select(batch_job).where(batch_job.c.job_id == job_id)).one_or_none()
    if row is None:
        raise unknown_job(job_id)
    return _job(row)


def list_jobs(db: Database, *, limit: int = 50, status: JobStatus | None = None) -> list[Job]:
    """Newest first."""
    statement = (
        sa.select(batch_job).order_by(batch_job.c.created_at.desc(), batch_job.c.job_id.desc()).limit(limit)
    )
    if status is not None:
        statement = statement.where(batch_job.c.status == status.value)
    with db.connect() as connection:
        return [_job(row) for row in connection.execute(statement)]


def set_job_status(
    db: Database,
    job_id: str,
    status: JobStatus,
    *,
    run: Run | None = None,
    error_message: str | None = None,
) -> Job:
    """Moves a job and returns it; the state it is in already changes nothing.

    A run that dies leaves its job in_progress, so that the next run continues it. EXPIRED records what is
    pending as expired, CANCELLED and FAILED as cancelled; COMPLETED is refused while anything is pending. An
    end state is never left again: the database itself refuses.

    Args:
        db: the platform's tables.
        job_id: the job.
        status: its next state.
        run: the run that moves it; None for whoever made a job that nothing runs.
        error_message: why it failed.

    Raises:
        StaleRunError: the run no longer owns the job.
        StorageError: the move is not legal from the job's state, requests are pending, or no run was given
            and one is executing the job.
    """
    with db.connect() as connection:
        current = held_status(connection, job_id, run)
        if current is not status:
            if not current.may_become(status):
                raise StorageError(
                    f"Job {job_id} is {current} and cannot become {status}; "
                    + ("submit a new job." if current.is_end else "see `blend status`."),
                    job_id=job_id,
                )
            values: dict[str, Any] = {"status": status.value, **_times(status)}
            if error_message is not None:
                values["error_message"] = clean_text(error_message)[0]
            if status in _STATUS_OF_PENDING:
                _close_pending(connection, job_id, _STATUS_OF_PENDING[status])
            connection.execute(sa.update(batch_job).where(batch_job.c.job_id == job_id).values(values))
        row = connection.execute(sa.select(batch_job).where(batch_job.c.job_id == job_id)).one()
    return _job(row)


def request_cancel(db: Database, job_id: str) -> JobStatus:
    """Asks a job to stop and returns its state after that.

    A job that is validating or in_progress becomes cancelling; one that is further on stays as it is.
    """
    with db.connect() as connection:
        current = _locked_status(connection, job_id)
        if current not in (JobStatus.VALIDATING, JobStatus.IN_PROGRESS):
            return current
        values = {"status": JobStatus.CANCELLING.value, **_times(JobStatus.CANCELLING)}
        connection.execute(sa.update(batch_job).where(batch_job.c.job_id == job_id).values(values))
    return JobStatus.CANCELLING


def close_pending(db: Database, job_id: str, status: JobStatus, *, run: Run | None = None) -> int:
    """Gives every request without a result one of status EXPIRED or CANCELLED, and returns how many that
    were.

    For a job that is exported before it enters its end state. Raises what `set_job_status` raises for `run`.
    """
    with db.connect() as connection:
        held_status(connection, job_id, run)
        return _close_pending(connection, job_id, _STATUS_OF_PENDING[status])


def held_status(connection: sa.Connection, job_id: str, run: Run | None) -> JobStatus:
    """Locks the job for a write of its run, or of nobody's where no run is live, and returns its state.

    Raises:
        StaleRunError: the run no longer owns the job.
        StorageError: no run was given and one is executing the job.
    """
    if run is not None:
        return JobStatus(hold_job(connection, run))
    status = _locked_status(connection, job_id)
    live = sa.select(run_table.c.run_id).where(run_table.c.job_id == job_id, run_table.c.status == "running")
    run_id = connection.execute(live).scalar_one_or_none()
    if run_id is not None:
        raise StorageError(
            f"Run {run_id} is executing job {job_id}, so nobody else may change it; `blend cancel` stops it.",
            job_id=job_id,
            run_id=run_id,
        )
    return status


def unknown_job(job_id: str) -> StorageError:
    """The error for an id that no job has."""
    return StorageError(f"There is no job {job_id}; `blend status` lists the jobs.", job_id=job_id)


_STATUS_OF_PENDING = {
    JobStatus.EXPIRED: JobStatus.EXPIRED,
    JobStatus.CANCELLED: JobStatus.CANCELLED,
    JobStatus.FAILED: JobStatus.CANCELLED,
}

# OpenAI's own codes and sentences for requests that a batch did not come to.
_PENDING_REASONS = {
    JobStatus.EXPIRED: ("batch_expired", "The completion window ended before this request ran."),
    JobStatus.CANCELLED: ("batch_cancelled", "The job ended before this request ran."),
}


def _times(status: JobStatus) -> dict[str, Any]:
    now = sa.func.clock_timestamp()
    if status.is_end:
        return {"finished_at": now}
    column = f"{status.value}_at"
    return {column: sa.func.coalesce(batch_job.c[column], now)}


def _locked_status(connection: sa.Connection, job_id: str) -> JobStatus:
    statement = sa.select(batch_job.c.status).where(batch_job.c.job_id == job_id).with_for_update()
    status = connection.execute(statement).scalar_one_or_none()
    if status is None:
        raise unknown_job(job_id)
    return JobStatus(status)


def _close_pending(connection: sa.Connection, job_id: str, status: JobStatus) -> int:
    code, message = _PENDING_REASONS[status]
    closed = connection.execute(
        sa.text(
            "INSERT INTO result (job_id, seq, status, error_code, error_message, finished_at) "
            "SELECT q.job_id, q.seq, :status, :code, :message, clock_timestamp() FROM request q "
            "WHERE q.job_id = :job_id AND NOT EXISTS "
            "(SELECT FROM result r WHERE r.job_id = q.job_id AND r.seq = q.seq) ON CONFLICT DO NOTHING"
        ),
        {"status": status.value, "code": code, "message": message, "job_id": job_id},
    ).rowcount
    counter = batch_job.c[f"num_{status.value}"]
    connection.execute(
        sa.update(batch_job).where(batch_job.c.job_id == job_id).values({counter.name: counter + closed})
    )
    return closed


def _job(row: sa.Row[Any]) -> Job:
    values = dict(row._mapping)
    values["status"] = JobStatus(values["status"])
    return Job(**{field.name: values[field.name] for field in fields(Job)})
