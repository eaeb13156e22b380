"""What a job has put out: its exported objects, and what came of writing its results back."""

from typing import Any

import sqlalchemy as sa

from storage.database import Database
from storage.jobs import held_status
from storage.ownership import Run, hold_job
from storage.schema import batch_job


def set_job_outputs(
    db: Database,
    job_id: str,
    *,
    output_uri: str | None,
    error_uri: str | None,
    table_uri: str | None,
    run: Run | None = None,
) -> None:
    """Records where the exported objects are. Raises what `set_job_status` raises for `run`."""
    values = {"output_uri": output_uri, "error_uri": error_uri, "table_uri": table_uri}
    with db.connect() as connection:
        held_status(connection, job_id, run)
        connection.execute(sa.update(batch_job).where(batch_job.c.job_id == job_id).values(values))


def set_job_write_back(db: Database, job_id: str, write_back: dict[str, Any], run: Run | None = None) -> None:
    """Records what came of writing the results into the user's table; without a run, of a job that has ended.

    Raises:
        StaleRunError: the run no longer owns the job.
    """
    with db.connect() as connection:
        if run is not None:
            hold_job(connection, run)
        values = {"write_back": write_back}
        connection.execute(sa.update(batch_job).where(batch_job.c.job_id == job_id).values(values))
