"""Nightly jobs as their schedule stands, and the jobs that are their nights."""

from dataclasses import dataclass, fields
from datetime import date, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from storage.database import Database
from storage.job_status import JobStatus
from storage.runs import is_held
from storage.schema import batch_job, nightly


@dataclass(frozen=True, slots=True)
class Nightly:
    """One row of `nightly`; the comments on its columns say what each is."""

    name: str
    cron: str
    timezone: str
    catch_up: str
    spec: dict[str, Any]
    home: str
    since: datetime
    served_at: datetime


@dataclass(frozen=True, slots=True)
class NightJob:
    """The latest job of one night.

    Attributes:
        job_id: the job.
        logical_date: the night.
        status: its state.
        attempt: from 1; a night that failed can be run again as a new job.
        is_running: whether a run holds it now.
    """

    job_id: str
    logical_date: date
    status: JobStatus
    attempt: int
    is_running: bool

    @property
    def is_to_be_repeated(self) -> bool:
        """Whether it failed, expired or was cancelled, so that the night may have another job."""
        return self.status.is_end and self.status is not JobStatus.COMPLETED


def register_nightly(
    db: Database, *, name: str, cron: str, timezone: str, catch_up: str, spec: dict[str, Any], home: str
) -> Nightly:
    """Writes down that a nightly job is served. Its nights count from the first time on this schedule."""
    now = sa.func.clock_timestamp()
    values = {
        "name": name,
        "cron": cron,
        "timezone": timezone,
        "catch_up": catch_up,
        "spec": spec,
        "home": home,
    }
    new = insert(nightly).values(values | {"since": now, "served_at": now})
    is_same = (nightly.c.cron == new.excluded.cron) & (nightly.c.timezone == new.excluded.timezone)
    statement = new.on_conflict_do_update(
        index_elements=["name"],
        set_={key: new.excluded[key] for key in values if key != "name"}
        | {"served_at": now, "since": sa.case((is_same, nightly.c.since), else_=now)},
    ).returning(nightly)
    with db.connect() as connection:
        return _nightly(connection.execute(statement).one())


def forget_nightlies(db: Database, home: str, *, but: str | None = None) -> None:
    """Removes what is not served any more from `home`; its jobs stay."""
    statement = sa.delete(nightly).where(nightly.c.home == home)
    if but is not None:
        statement = statement.where(nightly.c.name != but)
    with db.connect() as connection:
        connection.execute(statement)


def list_nightlies(db: Database) -> list[Nightly]:
    """By name."""
    with db.connect() as connection:
        return [_nightly(row) for row in connection.execute(sa.select(nightly).order_by(nightly.c.name))]


def night_jobs(db: Database, name: str) -> dict[date, NightJob]:
    """The latest job of every night of a nightly job, by logical date."""
    attempt = sa.func.row_number().over(
        partition_by=batch_job.c.logical_date, order_by=(batch_job.c.created_at, batch_job.c.job_id)
    )
    statement = (
        sa.select(batch_job.c.job_id, batch_job.c.logical_date, batch_job.c.status, attempt, is_held())
        .where(batch_job.c.nightly == name)
        .order_by(batch_job.c.logical_date, attempt)
    )
    with db.connect() as connection:
        rows = connection.execute(statement).all()
    # Later attempts come later and stay.
    return {row[1]: NightJob(row[0], row[1], JobStatus(row[2]), row[3], row[4]) for row in rows}


def _nightly(row: sa.Row[Any]) -> Nightly:
    values = row._mapping
    return Nightly(**{field.name: values[field.name] for field in fields(Nightly)})
