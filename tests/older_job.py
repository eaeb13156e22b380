"""Jobs that were made a while ago."""

import sqlalchemy as sa

from storage.database import Database
from storage.lost_runs import JUST_MADE
from storage.schema import batch_job


def make_older(db: Database, job_id: str) -> None:
    """Makes a job as old as no longer counts as just made."""
    with db.connect() as connection:
        connection.execute(
            sa.update(batch_job)
            .where(batch_job.c.job_id == job_id)
            .values(created_at=sa.func.clock_timestamp() - JUST_MADE)
        )
