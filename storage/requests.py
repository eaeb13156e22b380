"""Request rows and error rows of ingest, by COPY."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import psycopg
import sqlalchemy as sa

from blend_core.errors import RequestErrorCode, StaleRunError, StorageError
from storage.copying import copy_rows, instant_us, store_all
from storage.database import Database
from storage.job_status import JobStatus
from storage.jobs import unknown_job
from storage.ownership import Run, hold_job
from storage.postgres_text import clean_text, cut_text
from storage.schema import batch_job, request, result

_BATCH_ROWS = 10_000
_MAX_ID_BYTES = 512  # an index entry has a limit; a longer id cannot be looked up by
_MAX_MESSAGE_CHARS = 2_000
_MAX_EXCERPT_CHARS = 2_000

_REQUEST_COLUMNS = {
    "job_id": "text", "seq": "int8", "is_valid": "bool", "custom_id": "text", "source_uri": "text",
    "source_line": "int8", "endpoint": "text", "model": "text", "num_prompt_tokens": "int8",
    "max_tokens": "int8", "prompt_excerpt": "text", "shard_index": "int8", "text_cleaned": "bool",
    "prompt_template": "text",
}  # fmt: skip
_RESULT_COLUMNS = {
    "job_id": "text", "seq": "int8", "status": "text", "error_code": "text", "error_message": "text",
    "finished_at": "timestamptz", "text_cleaned": "bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One line or row of a source, good or bad. Text that Postgres cannot hold is cleaned and flagged on
    write.

    Attributes:
        seq: number in the job: every non-blank line and every row counts from 0, bad ones included.
        source_uri: `s3://…`, or `sql:<name>`; never with a password.
        source_line: line of the object or row of the query, from 1.
        custom_id: the user's own id, as far as it could be read.
        endpoint: `/v1/chat/completions` or `/v1/completions`; None where the line did not tell.
        model: the line's own `model`, recorded only.
        num_prompt_tokens: tokens of the rendered prompt; None for a bad line.
        max_tokens: upper bound of the answer; None for a bad line.
        prompt_excerpt: first characters of the prompt, of the raw line for a bad one.
        shard_index: request shard that holds the token ids; None for a bad line.
        prompt_template: what requests whose answers are likely to be alike have in common, as a short key of
            plain letters; None where the length of the answer is preset, and for a bad line.
    """

    seq: int
    source_uri: str
    source_line: int
    custom_id: str | None = None
    endpoint: str | None = None
    model: str | None = None
    num_prompt_tokens: int | None = None
    max_tokens: int | None = None
    prompt_excerpt: str | None = None
    shard_index: int | None = None
    prompt_template: str | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    row: RequestRow
    code: RequestErrorCode | None = None
    message: str | None = None


class RequestWriter:
    """Writes a job's requests in batches, each committed with the job's counters.

    Entering removes what an unfinished ingest of the same job left behind its last checkpoint; a clean exit
    marks the ingest as complete, after which the job takes no more requests. A row that the database refuses
    becomes an error row and takes no other row with it.
    """

    __slots__ = (
        "_db", "_entries", "_fencing_number", "_index_key", "_job_id", "_num_errored", "_num_kept",
        "_num_total", "_on_complete", "_read", "_run",
    )  # fmt: skip

    def __init__(
        self,
        db: Database,
        job_id: str,
        run: Run | None = None,
        *,
        num_kept: int = 0,
        on_complete: Callable[[psycopg.Connection], None] | None = None,
    ) -> None:
        """Changes nothing.

        Args:
            db: the platform's tables.
            job_id: the job.
            run: the run that ingests; with None, whichever owns the job on entering.
            num_kept: requests of an earlier ingest that stay, those of its last checkpoint: seq 0 and up.
            on_complete: writes more in the transaction that marks the ingest as complete; its errors undo
                that.
        """
        self._db = db
        self._job_id = job_id
        self._run = run
        self._on_complete = on_complete
        self._entries: list[_Entry] = []
        self._read: dict[int, int] = {}
        self._num_kept = num_kept
        self._num_total = num_kept
        self._num_errored = 0
        self._fencing_number = 0
        self._index_key: str | None = None

    @property
    def num_total(self) -> int:
        """Rows kept and added, bad ones included."""
        return self._num_total

    @property
    def num_errored(self) -> int:
        """Bad rows among them."""
        return self._num_errored

    def add(self, row: RequestRow) -> None:
        """Adds a valid request."""
        self._give(_Entry(row))

    def add_error(self, row: RequestRow, code: RequestErrorCode, message: str) -> None:
        """Adds a bad one: a request row and an errored result. `message` never holds the prompt."""
        self._num_errored += 1
        self._give(_Entry(row, code, message))

    def source_read(self, source_index: int, num_items: int) -> None:
        """Remembers that a source has been read to its end, for the next checkpoint or the clean exit."""
        self._read[source_index] = num_items

    def shards_stored(self, index_key: str | None) -> None:
        """Remembers which index names the stored shards, for the next checkpoint or the clean exit."""
        self._index_key = index_key

    def checkpoint(self) -> None:
        """Commits all rows, and with them which sources need not be read again. The shards come first."""
        self._flush(is_last=False, is_checkpoint=True)

    def __enter__(self) -> Self:
        """Removes what an earlier ingest left behind its last checkpoint.

        Raises:
            StaleRunError: the run no longer owns the job; nothing is removed.
            StorageError: the ingest of the job is complete already, or the job has ended.
        """
        with self._db.connect() as connection:
            if self._run is not None:
                hold_job(connection, self._run)
            job = connection.execute(
                sa.select(batch_job.c.status, batch_job.c.ingested_at, batch_job.c.fencing_number)
                .where(batch_job.c.job_id == self._job_id)
                .with_for_update()
            ).one_or_none()
            if job is None:
                raise unknown_job(self._job_id)
            if job.ingested_at is not None or JobStatus(job.status).is_end:
                raise StorageError(
                    f"Job {self._job_id} has all its requests already; submit a new job.", job_id=self._job_id
                )
            self._fencing_number = job.fencing_number
            for table in (request, result):
                connection.execute(
                    sa.delete(table).where(table.c.job_id == self._job_id, table.c.seq >= self._num_kept)
                )
            # Whatever has a result before anything ran is an error row.
            kept = sa.select(sa.func.count()).where(result.c.job_id == self._job_id)
            self._num_errored = connection.execute(kept).scalar_one()
            connection.execute(
                sa.update(batch_job)
                .where(batch_job.c.job_id == self._job_id)
                .values(
                    num_total=self._num_kept,
                    num_succeeded=0,
                    num_errored=self._num_errored,
                    num_expired=0,
                    num_cancelled=0,
                )
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._flush(is_last=True, is_checkpoint=True)

    def _give(self, entry: _Entry) -> None:
        self._num_total += 1
        self._entries.append(entry)
        if len(self._entries) >= _BATCH_ROWS:
            self._flush(is_last=False, is_checkpoint=False)

    def _flush(self, *, is_last: bool, is_checkpoint: bool) -> None:
        entries, self._entries = self._entries, []
        num_refused = 0
        with self._db.raw() as connection:
            if self._run is not None:
                hold_job(connection, self._run)

            def store(part: Sequence[_Entry]) -> None:
                copy_rows(connection, "request", _REQUEST_COLUMNS, (self._request(entry) for entry in part))
                errors = (self._result(entry) for entry in part if entry.code is not None)
                copy_rows(connection, "result", _RESULT_COLUMNS, errors)

            def refused(entry: _Entry, error: Exception) -> None:
                nonlocal num_refused
                num_refused += entry.code is None
                store((_refused(entry, error),))

            store_all(connection, entries, store, refused)
            num_errored = num_refused + sum(entry.code is not None for entry in entries)
            updated = connection.execute(
                "UPDATE batch_job SET num_total = num_total + %s, num_errored = num_errored + %s,"
                " ingested_at = CASE WHEN %s THEN clock_timestamp() END,"
                " request_index = CASE WHEN %s THEN %s ELSE request_index END"
                " WHERE job_id = %s AND fencing_number = %s AND ingested_at IS NULL AND finished_at IS NULL",
                (
                    len(entries),
                    num_errored,
                    is_last,
                    is_checkpoint,
                    self._index_key,
                    self._job_id,
                    self._fencing_number,
                ),
            ).rowcount
            if not updated:
                raise StaleRunError(
                    f"Another run took over job {self._job_id} or it ended; stop this ingest.",
                    job_id=self._job_id,
                )
            if is_checkpoint:
                # Two arrays, not a statement each: there may be thousands of small objects.
                connection.execute(
                    "UPDATE job_source s SET num_items = r.num_items"
                    " FROM unnest(%s::bigint[], %s::bigint[]) AS r (source_index, num_items)"
                    " WHERE s.job_id = %s AND s.source_index = r.source_index",
                    (list(self._read), list(self._read.values()), self._job_id),
                )
            if is_last and self._on_complete is not None:
                self._on_complete(connection)
        if is_checkpoint:
            self._read.clear()
        self._num_errored += num_refused

    def _request(self, entry: _Entry) -> tuple[Any, ...]:
        row = entry.row
        texts = (row.custom_id, row.source_uri, row.endpoint, row.model, row.prompt_excerpt)
        is_cleaned = False
        clean: list[str | None] = []
        for text in texts:
            if text is not None:
                text, was_cleaned = clean_text(text)
                is_cleaned |= was_cleaned
            clean.append(text)
        custom_id, source_uri, endpoint, model, excerpt = clean
        if custom_id is not None and len(custom_id.encode()) > _MAX_ID_BYTES:
            custom_id = custom_id.encode()[:_MAX_ID_BYTES].decode(errors="ignore")
            is_cleaned = True
        if excerpt is not None:
            excerpt = cut_text(excerpt, _MAX_EXCERPT_CHARS)
        return (
            self._job_id, row.seq, entry.code is None, custom_id, source_uri, row.source_line, endpoint,
            model, row.num_prompt_tokens, row.max_tokens, excerpt, row.shard_index, is_cleaned,
            row.prompt_template,
        )  # fmt: skip

    def _result(self, entry: _Entry) -> tuple[Any, ...]:
        assert entry.code is not None
        message, is_cleaned = clean_text(cut_text(entry.message or "", _MAX_MESSAGE_CHARS))
        return (
            self._job_id,
            entry.row.seq,
            "errored",
            entry.code.value,
            message,
            instant_us(time.time()),
            is_cleaned,
        )


def _refused(entry: _Entry, error: Exception) -> _Entry:
    """The error row that stands for a row which the database refused: only what it surely takes."""
    row = replace(entry.row, num_prompt_tokens=None, max_tokens=None, shard_index=None, prompt_template=None)
    if isinstance(error, psycopg.errors.UniqueViolation):
        message = "Another request of the job has this custom_id; make custom_id unique."
        return _Entry(row, RequestErrorCode.DUPLICATE_CUSTOM_ID, message)
    state = getattr(error, "sqlstate", None) or type(error).__name__
    return _Entry(
        row,
        RequestErrorCode.INVALID_VALUE,
        f"A value of the row cannot be stored ({state}); correct the row.",
    )
