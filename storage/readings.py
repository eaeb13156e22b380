"""What jobs of a name have read already: watermarks of queries, versions of objects.

A reading is written in the transaction that marks the ingest of its job as complete, and stays whatever
becomes of the job. What a job that was cancelled, expired or failed left without a result is a leftover: the
next job of the name reads just that again. So nothing is skipped, and nothing that has a result is asked
twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import psycopg
import sqlalchemy as sa

from blend_core.errors import StorageError, StorageUnavailableError
from storage.database import Database
from storage.objects import ObjectEntry
from storage.schema import source_object, source_reading

_UNANSWERED = """
  JOIN batch_job j ON j.job_id = t.job_id AND j.status IN ('failed', 'cancelled', 'expired')
  JOIN request q ON q.job_id = t.job_id
  JOIN result r ON r.job_id = q.job_id AND r.seq = q.seq AND r.status IN ('cancelled', 'expired')
 WHERE t.job_name = :job_name AND t.taken_over_by IS NULL"""


@dataclass(frozen=True, slots=True)
class Watermark:
    """How far a query has been read.

    Attributes:
        value: the greatest value of the watermark column, as JSON writes it; None while nothing was read.
        edge_ids: ids of the rows of that very value that were read.
    """

    value: str | None = None
    edge_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What ended jobs have read and left without a result.

    Attributes:
        job_ids: those jobs.
        ids: their `custom_id`s.
    """

    job_ids: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QueryReading:
    """One query that was read to its end.

    Attributes:
        source: connection and watermark column.
        source_uri: what its requests name as their source.
        watermark: how far it has been read now.
        num_rows: rows that were read.
        took_over: jobs whose leftovers are among them.
    """

    source: str
    source_uri: str
    watermark: Watermark
    num_rows: int
    took_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KnownSource:
    """One line of `blend watermark show`.

    Attributes:
        job_name: the jobs' name.
        source: connection and watermark column of a query; `s3` for the objects together.
        watermark: how far a query was read; None for objects.
        num_read: rows, or objects, that were read so far.
        job_id: the job that read last.
        read_at: when.
    """

    job_name: str
    source: str
    watermark: str | None
    num_read: int
    job_id: str
    read_at: datetime


class Readings:
    """The readings of jobs of one name, as they were when this was made."""

    __slots__ = ("_db", "_job_name", "_state")

    def __init__(self, db: Database, job_name: str) -> None:
        """Remembers where the readings stand; another job's reading in between is found out in `record`."""
        self._db = db
        self._job_name = job_name
        with db.connect() as connection:
            self._state = tuple(connection.execute(sa.text(_STATE), {"job_name": job_name}).one())

    def watermark(self, source: str) -> Watermark:
        """How far a query has been read."""
        statement = (
            sa.select(source_reading.c.watermark, source_reading.c.edge_ids)
            .where(source_reading.c.job_name == self._job_name, source_reading.c.source == source)
            .order_by(source_reading.c.number.desc())
            .limit(1)
        )
        with self._db.connect() as connection:
            row = connection.execute(statement).one_or_none()
        return Watermark() if row is None else Watermark(row.watermark, tuple(row.edge_ids))

    def leftovers(self, source: str) -> Leftovers:
        """Rows of a query that ended jobs left without a result."""
        statement = sa.text(
            f"SELECT DISTINCT t.job_id, q.custom_id FROM source_reading t {_UNANSWERED}"  # noqa: S608
            " AND t.source = :source AND q.source_uri = t.source_uri AND q.custom_id IS NOT NULL"
        )
        with self._db.connect() as connection:
            rows = connection.execute(statement, {"job_name": self._job_name, "source": source}).all()
        return Leftovers(
            tuple(sorted({row.job_id for row in rows})), tuple(sorted({row.custom_id for row in rows}))
        )

    def objects(self) -> set[tuple[str, str]]:
        """Address and version of every object that was read."""
        statement = sa.select(source_object.c.uri, source_object.c.etag).where(
            source_object.c.job_name == self._job_name
        )
        with self._db.connect() as connection:
            return {(row.uri, row.etag) for row in connection.execute(statement)}

    def leftover_lines(self) -> dict[tuple[str, str], set[int]]:
        """Lines that ended jobs left without a result, by address and version of their object."""
        statement = sa.text(
            f"SELECT t.uri, t.etag, array_agg(q.source_line) AS lines FROM source_object t {_UNANSWERED}"  # noqa: S608
            " AND q.source_uri = t.uri GROUP BY t.uri, t.etag"
        )
        with self._db.connect() as connection:
            rows = connection.execute(statement, {"job_name": self._job_name}).all()
        return {(row.uri, row.etag): set(row.lines) for row in rows}

    def record(
        self,
        connection: psycopg.Connection,
        job_id: str,
        queries: Sequence[QueryReading],
        objects: Sequence[ObjectEntry],
    ) -> None:
        """Writes down what a job has read, in the caller's transaction.

        Raises:
            StorageUnavailableError: another job of the name has read meanwhile, or somebody has reset a
                watermark; the ingest is to be done anew.
        """
        # One at a time, so that of two jobs that read the same rows only the first keeps them.
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (self._job_name,))
        state = connection.execute(_STATE.replace(":job_name", "%(job_name)s"), {"job_name": self._job_name})
        if state.fetchone() != self._state:
            raise StorageUnavailableError(
                f"Another job named {self._job_name!r} has read the sources meanwhile, or a watermark was "
                f"reset; run job {job_id} again.",
                job_id=job_id,
            )
        for reading in queries:
            connection.execute(
                "UPDATE source_reading SET taken_over_by = %s"
                " WHERE job_name = %s AND source = %s AND job_id = ANY(%s)",
                (job_id, self._job_name, reading.source, list(reading.took_over)),
            )
            connection.execute(
                "INSERT INTO source_reading"
                " (job_name, source, source_uri, job_id, watermark, edge_ids, num_rows)"
                " VALUES (%s, %s, %s, %s, %s, %s, %s)",
                (
                    self._job_name, reading.source, reading.source_uri, job_id, reading.watermark.value,
                    list(reading.watermark.edge_ids), reading.num_rows,
                ),
            )  # fmt: skip
        uris, etags = [entry.uri for entry in objects], [entry.etag for entry in objects]
        connection.execute(
            "UPDATE source_object o SET taken_over_by = %s"
            " FROM unnest(%s::text[], %s::text[]) AS n (uri, etag)"
            " WHERE o.job_name = %s AND o.uri = n.uri AND o.etag = n.etag AND o.taken_over_by IS NULL",
            (job_id, uris, etags, self._job_name),
        )
        connection.execute(
            "INSERT INTO source_object (job_name, uri, etag, job_id)"
            " SELECT %s, n.uri, n.etag, %s FROM unnest(%s::text[], %s::text[]) AS n (uri, etag)",
            (self._job_name, job_id, uris, etags),
        )


_STATE = """
SELECT (SELECT max(number) FROM source_reading WHERE job_name = :job_name),
       (SELECT count(*) FROM source_object WHERE job_name = :job_name)"""


def known_sources(db: Database, job_name: str | None = None) -> list[KnownSource]:
    """What is remembered, by job name and source; of one name, or of every one."""
    statement = sa.text(
        "SELECT job_name, source, (array_agg(watermark ORDER BY number DESC))[1], sum(num_rows),"
        " (array_agg(job_id ORDER BY number DESC))[1], max(read_at) FROM source_reading GROUP BY 1, 2"
        " UNION ALL SELECT job_name, 's3', NULL, count(DISTINCT (uri, etag)),"
        " (array_agg(job_id ORDER BY read_at DESC))[1], max(read_at) FROM source_object GROUP BY 1"
        " ORDER BY 1, 2"
    )
    with db.connect() as connection:
        rows = connection.execute(statement).all()
    found = [
        KnownSource(name, source, watermark, int(num_read), job_id, read_at)
        for name, source, watermark, num_read, job_id, read_at in rows
    ]
    return [source for source in found if job_name in (None, source.job_name)]


def reset_readings(
    db: Database, job_name: str, source: str | None = None, watermark: str | None = None
) -> int:
    """Forgets what jobs of a name have read, of one source or of all, and returns how many sources that were.

    Args:
        db: the platform's tables.
        job_name: the jobs' name.
        source: as `known_sources` says it; None for every source.
        watermark: set the query's watermark to this value: rows of that value and later are new.

    Raises:
        StorageError: nothing is remembered under that name and source, or a watermark was given for no query.
    """
    chosen = [entry for entry in known_sources(db, job_name) if source in (None, entry.source)]
    if not chosen:
        raise StorageError(
            f"Nothing is remembered of {source or 'sources'} of jobs named {job_name!r}; "
            "`blend watermark show` lists what is."
        )
    if watermark is not None and (len(chosen) != 1 or chosen[0].source == "s3"):
        raise StorageError("A watermark is set for one query; name it with --source.")
    with db.connect() as connection:
        connection.execute(
            sa.text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": job_name}
        )
        for entry in chosen:
            if entry.source == "s3":
                connection.execute(sa.delete(source_object).where(source_object.c.job_name == job_name))
                continue
            of_source = (source_reading.c.job_name == job_name) & (source_reading.c.source == entry.source)
            connection.execute(sa.delete(source_reading).where(of_source))
            if watermark is not None:
                values: Mapping[str, object] = {
                    "job_name": job_name, "source": entry.source, "source_uri": "", "job_id": "reset",
                    "watermark": watermark, "num_rows": 0,
                }  # fmt: skip
                connection.execute(sa.insert(source_reading).values(values))
    return len(chosen)
