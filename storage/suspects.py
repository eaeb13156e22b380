"""Deaths of engines, and the requests that may be why: kept in the database, so that no restart forgets them.

What was in flight when an engine died is under suspicion. Suspects run again apart from all others, in groups
that are halved at every death, until the one that kills engines is alone. A group that gets its answers is
cleared by having them. Something outside may kill engines as well: so one that was alone runs alone again
only when all others have run, and is to blame when they had answers in between from the same rank's engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from storage.database import Database
from storage.ownership import Run, hold_job
from storage.postgres_text import clean_text
from storage.schema import engine_suspect, result, run

MIN_DEATHS_ALONE = 2
MAX_DEATHS_ALONE = 4


@dataclass(frozen=True, slots=True)
class EngineDeath:
    """One entry of a run's `engine_deaths`.

    Attributes:
        died_at: when it was noticed.
        reason: one sentence.
        num_in_flight: requests that were in flight.
    """

    died_at: datetime
    reason: str
    num_in_flight: int

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "died_at": self.died_at.isoformat(),
            "reason": self.reason,
            "num_in_flight": self.num_in_flight,
        }


@dataclass(frozen=True, slots=True)
class Suspect:
    """A request under suspicion that has no result yet; the comments on `engine_suspect` say what each is."""

    seq: int
    group_number: int
    num_deaths: int
    num_deaths_alone: int
    others_answered: bool

    @property
    def is_culprit(self) -> bool:
        """Whether engines die of it: two did while it ran alone, and others gave answers between.

        Where no other request is left to tell, four deaths are enough.
        """
        enough = MIN_DEATHS_ALONE if self.others_answered else MAX_DEATHS_ALONE
        return self.num_deaths_alone >= enough


def record_engine_death(
    db: Database, the_run: Run, reason: str, in_flight: Sequence[int], *, others_answered: bool
) -> None:
    """Writes a death into the run's row and puts what was in flight under suspicion, in two halves.

    Args:
        db: the platform's tables.
        the_run: whose engine died.
        reason: one sentence, without a prompt.
        in_flight: requests that had started and not ended, neighbours beside one another.
        others_answered: whether the engine, or one before it on its rank, answered other requests since what
            was in flight killed one there last. Engines that die of something else die whatever they run.

    Raises:
        StaleRunError: the run no longer owns its job; nothing is written.
    """
    death = sa.func.jsonb_build_array(
        sa.func.jsonb_build_object(
            sa.literal("died_at"), sa.func.clock_timestamp(),
            sa.literal("reason"), sa.literal(clean_text(reason)[0]),
            sa.literal("num_in_flight"), sa.literal(len(in_flight)),
        )
    )  # fmt: skip
    with db.connect() as connection:
        hold_job(connection, the_run)
        connection.execute(
            sa.update(run)
            .where(run.c.run_id == the_run.run_id)
            .values(engine_deaths=run.c.engine_deaths.op("||")(death))
        )
        if in_flight:
            _suspect(connection, the_run.job_id, in_flight, others_answered)


def _suspect(connection: sa.Connection, job_id: str, in_flight: Sequence[int], others_answered: bool) -> None:
    newest = sa.select(sa.func.coalesce(sa.func.max(engine_suspect.c.group_number), 0)).where(
        engine_suspect.c.job_id == job_id
    )
    last_number = connection.execute(newest).scalar_one()
    middle = (len(in_flight) + 1) // 2
    is_alone = int(len(in_flight) == 1)
    rows = insert(engine_suspect).values(
        [
            {
                "job_id": job_id,
                "seq": seq,
                "group_number": last_number + (1 if place < middle else 2),
                "num_deaths": 1,
                "num_deaths_alone": is_alone,
            }
            for place, seq in enumerate(in_flight)
        ]
    )
    connection.execute(
        rows.on_conflict_do_update(
            index_elements=["job_id", "seq"],
            set_={
                "group_number": rows.excluded.group_number,
                "num_deaths": engine_suspect.c.num_deaths + 1,
                "num_deaths_alone": engine_suspect.c.num_deaths_alone + is_alone,
                "others_answered": sa.or_(
                    engine_suspect.c.others_answered,
                    sa.and_(
                        sa.literal(is_alone == 1 and others_answered),
                        engine_suspect.c.num_deaths_alone > 0,
                    ),
                ),
                "last_death_at": sa.func.clock_timestamp(),
            },
        )
    )


def pending_suspects(db: Database, job_id: str) -> list[Suspect]:
    """Suspects without a result, by group and seq."""
    columns = [
        engine_suspect.c[name]
        for name in ("seq", "group_number", "num_deaths", "num_deaths_alone", "others_answered")
    ]
    has_result = (
        sa.select(result.c.seq)
        .where(result.c.job_id == engine_suspect.c.job_id, result.c.seq == engine_suspect.c.seq)
        .exists()
    )
    statement = (
        sa.select(*columns)
        .where(engine_suspect.c.job_id == job_id, ~has_result)
        .order_by(engine_suspect.c.group_number, engine_suspect.c.seq)
    )
    with db.connect() as connection:
        return [Suspect(*row) for row in connection.execute(statement)]


def engine_deaths(db: Database, job_id: str) -> list[EngineDeath]:
    """Every death of a job's engines, over all its runs, in order of time."""
    statement = sa.select(run.c.engine_deaths).where(run.c.job_id == job_id).order_by(run.c.fencing_number)
    with db.connect() as connection:
        return [
            EngineDeath(datetime.fromisoformat(entry["died_at"]), entry["reason"], entry["num_in_flight"])
            for entries in connection.execute(statement).scalars()
            for entry in entries
        ]
