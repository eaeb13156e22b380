"""Runs whose process is known to be dead: freed before their lease has ended."""

from collections.abc import Mapping
from dataclasses import dataclass

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
    """

    run_id: str
    details: Mapping[str, str]


def live_run(db: Database, job_id: str) -> LiveRun | None:
    """The run that executes a job, or None; its lease may have ended."""
    statement = sa.select(run.c.run_id, run.c.details).where(
        run.c.job_id == job_id, run.c.status == RunStatus.RUNNING.value
    )
    with db.connect() as connection:
        row = connection.execute(statement).one_or_none()
    return None if row is None else LiveRun(row.run_id, row.details)


def mark_lost(db: Database, run_id: str) -> None:
    """Ends a run as lost; its writes are refused from then on. An ended run stays as it is."""
    with db.connect() as connection:
        connection.execute(
            sa.update(run)
            .where(run.c.run_id == run_id, run.c.status == RunStatus.RUNNING.value)
            .values(status=RunStatus.LOST.value, finished_at=sa.func.clock_timestamp())
        )
