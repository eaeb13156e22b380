"""Which run owns a job, and the check that every write of a run makes in its own transaction."""

from dataclasses import dataclass

import psycopg
import sqlalchemy as sa

from blend_core.errors import StaleRunError


@dataclass(frozen=True, slots=True)
class Run:
    """What a writer must hold to write for a job."""

    run_id: str
    job_id: str
    fencing_number: int

    @property
    def key_part(self) -> str:
        """Names the run in keys of objects, so that no other run writes them; sorts by fencing number."""
        return f"{self.fencing_number:06}-{self.run_id}"


# One statement for both kinds of connection. A run that was taken over or has ended, or whose job has ended,
# finds no row. The lock keeps a takeover out until the write is committed.
_HOLD = """
SELECT j.status FROM batch_job j JOIN run r ON r.run_id = j.current_run_id
WHERE j.job_id = {job_id} AND j.current_run_id = {run_id} AND j.fencing_number = {number}
  AND j.finished_at IS NULL AND r.status = 'running'
FOR UPDATE OF j
"""
_HOLD_SQLALCHEMY = sa.text(_HOLD.format(job_id=":job_id", run_id=":run_id", number=":number"))
_HOLD_PSYCOPG = _HOLD.format(job_id="%(job_id)s", run_id="%(run_id)s", number="%(number)s")


def hold_job(connection: sa.Connection | psycopg.Connection, run: Run) -> str:
    """Locks the run's job until the transaction ends and returns the job's state.

    Raises:
        StaleRunError: another run took over, the run has ended, or the job has.
    """
    values = {"job_id": run.job_id, "run_id": run.run_id, "number": run.fencing_number}
    if isinstance(connection, sa.Connection):
        status = connection.execute(_HOLD_SQLALCHEMY, values).scalar_one_or_none()
    else:
        row = connection.execute(_HOLD_PSYCOPG, values).fetchone()
        status = None if row is None else row[0]
    if status is None:
        raise stale_run(run)
    return str(status)


def stale_run(run: Run) -> StaleRunError:
    """The error for a run that no longer owns its job."""
    return StaleRunError(
        f"Run {run.run_id} no longer owns job {run.job_id}; another run took over or the job ended. "
        "Stop this one; nothing is lost.",
        run_id=run.run_id,
        job_id=run.job_id,
    )
