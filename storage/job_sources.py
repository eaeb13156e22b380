"""What a job reads: its objects and queries as they were listed, and how far ingest has come."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from blend_core.errors import StorageError
from storage.copying import copy_rows
from storage.database import Database
from storage.ownership import Run, hold_job
from storage.schema import job_source

_COLUMNS = {
    "job_id": "text", "source_index": "int8", "part": "text", "uri": "text", "size_bytes": "int8",
    "etag": "text",
}  # fmt: skip
_FETCH_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class JobSource:
    """One object or query of a job.

    Attributes:
        part: the field of the job that named it, numbered from 1 where it is a list of tables or queries:
            `s3`, `parquet:1`, `sql:1`.
        uri: `s3://bucket/key`, or `sql:1`.
        size_bytes: of an object.
        etag: version of an object.
        num_items: lines or rows in it, bad ones included; None until they are all stored.
    """

    part: str
    uri: str
    size_bytes: int | None = None
    etag: str | None = None
    num_items: int | None = None


def save_job_sources(db: Database, job_id: str, run: Run, sources: Sequence[JobSource]) -> None:
    """Writes down what a job will read, in that order, in place of an earlier list.

    Raises:
        StaleRunError: the run no longer owns the job.
        StorageError: the job has been read already.
    """
    with db.raw() as connection:
        hold_job(connection, run)
        ingested = connection.execute(
            "SELECT FROM batch_job WHERE job_id = %s AND ingested_at IS NOT NULL", (job_id,)
        ).fetchone()
        if ingested is not None:
            raise StorageError(f"Job {job_id} has all its requests already; submit a new job.", job_id=job_id)
        connection.execute("DELETE FROM job_source WHERE job_id = %s", (job_id,))
        rows = (
            (job_id, index, source.part, source.uri, source.size_bytes, source.etag)
            for index, source in enumerate(sources)
        )
        copy_rows(connection, "job_source", _COLUMNS, rows)


def load_job_sources(db: Database, job_id: str) -> list[JobSource]:
    """What a job reads, in that order; nothing before its ingest has begun."""
    columns = [job_source.c[name] for name in ("part", "uri", "size_bytes", "etag", "num_items")]
    with db.connect() as connection:
        rows = connection.execute(
            sa.select(*columns).where(job_source.c.job_id == job_id).order_by(job_source.c.source_index)
        )
        return [JobSource(*row) for row in rows]


def iter_used_ids(db: Database, job_id: str, below_seq: int) -> Iterator[list[tuple[str, str, int]]]:
    """The ids that the first requests of a job use, in their order, in batches: (custom_id, uri, line)."""
    with db.raw() as connection, connection.cursor(name="used_ids", binary=True) as cursor:
        cursor.execute(
            "SELECT custom_id, source_uri, source_line FROM request"
            " WHERE job_id = %s AND seq < %s AND custom_id IS NOT NULL ORDER BY seq",
            (job_id, below_seq),
        )
        while rows := cursor.fetchmany(_FETCH_ROWS):
            yield rows
