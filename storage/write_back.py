"""Results upserted into a table of the user's, in bounded batches."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg

from blend_core.errors import ConfigurationError, RequestErrorCode, StorageError, StorageUnavailableError
from storage.copying import store_all
from storage.postgres_connection import connect_options, plain_url, what_ran_out
from storage.postgres_text import without_values
from storage.results import ResultRow
from storage.target_table import WriteBackTarget, target_columns, upsert_statement

_BATCH_ROWS = 500
_BATCH_CHARS = 4 << 20
_STATEMENT_TIMEOUT_MS = 60_000
# So many rows may take longer than that, each alone, before the writing ends: each costs a minute.
_MAX_LATE_ROWS = 10
# A lock is waited for in parts: between two of them a run may be told to end. A minute in all.
_LOCK_TIMEOUT_MS = 5_000
_MAX_LOCK_WAITS = 12
_NUM_NAMED_IDS = 3
# SQLSTATE, the beginning of it: no lock in time, or rolled back for another transaction; out of resources, or
# ended by the operator or a time limit.
_LOCKED = ("55P03", "40")
_ENDED_BY_THE_SERVER = ("53", "57")
_NOT_A_WORD_OF_THE_SOURCE = RequestErrorCode.DUPLICATE_CUSTOM_ID


@dataclass(slots=True)
class WriteBackCounts:
    """What has come of it so far. It rises with every batch that is committed, and stays where the writing
    breaks off.

    Together the counts are the results that were tried: all of them, but for those without an answer where no
    column takes their error.

    Attributes:
        num_written: results that the table took, by the server's own count. Two whose ids are one key there
            (`1` and `01` in an integer column) both count, and the later one stays.
        num_refused: results that the table, a trigger or a policy of it refused with an error.
        num_dropped: results that a trigger of the table left out without an error.
        num_without_key: requests that have no `custom_id`, or another request's.
        refused: the first refused ids, each with the server's reason.
    """

    num_written: int = 0
    num_refused: int = 0
    num_dropped: int = 0
    num_without_key: int = 0
    refused: list[str] = field(default_factory=list)

    def add(self, num_tried: int, num_taken: int, refused: Sequence[str]) -> None:
        """Counts a batch that is committed: what was tried, what the table took, and what it refused."""
        self.num_written += num_taken
        self.num_refused += len(refused)
        self.num_dropped += num_tried - num_taken - len(refused)
        self.refused += refused[: _NUM_NAMED_IDS - len(self.refused)]

    def refusal(self, table: str) -> str | None:
        """What the table refused, in one sentence; None for nothing."""
        if not self.refused:
            return None
        num_more = self.num_refused - len(self.refused)
        more = f" and {num_more} more" if num_more else ""
        return f"{table} refused {', '.join(self.refused)}{more}; correct the table or the ids."


def check_target(target: WriteBackTarget) -> None:
    """Checks that table, columns, unique key and rights are there.

    Raises:
        ConfigurationError: names what is missing.
        StorageUnavailableError: the server did not answer.
    """
    with _connected(target) as connection:
        target_columns(connection, target)


def write_results(
    target: WriteBackTarget,
    job_id: str,
    model: str,
    rows: Iterable[ResultRow],
    counts: WriteBackCounts,
    *,
    before_batch: Callable[[], None],
    may_wait: Callable[[], bool],
) -> None:
    """Upserts results by key, each batch in a transaction of its own. Doing it again changes nothing.

    A row that is there keeps its other columns; one that is not is inserted. A row that the table, a trigger
    or a policy refuses is counted and takes no other with it. After a full batch's rows that were refused one
    after another the writing ends.

    Args:
        target: where to.
        job_id: the job.
        model: its model.
        rows: its results.
        counts: is told what comes of them; mutated.
        before_batch: is called before each try of a batch; what it raises ends the writing and passes
            through.
        may_wait: asked every few seconds while another transaction locks the table or rows of it; after a
            minute it is not waited for any more. Also before rows that took too long are tried in halves.

    Raises:
        ConfigurationError: the table has no such columns.
        StorageError: the table cannot be written, or refuses row after row.
        StorageUnavailableError: the server did not answer or broke off, or the table is locked; what was
            written stays.
    """
    with _connected(target) as connection:
        statement = upsert_statement(target, target_columns(connection, target))

        def store(part: Sequence[ResultRow]) -> int:
            answer = connection.execute(statement, _values(target, job_id, model, part)).fetchone()
            assert answer is not None
            return int(answer[0])

        # A refused row costs many statements: a table that takes nothing would take hours to say so.
        refused_in_a_row: list[str] = []
        max_rows, num_late = _BATCH_ROWS, 0
        for batch in _batches(rows):
            left = [row for row in batch if _has_own_key(row)]
            counts.num_without_key += len(batch) - len(left)
            if not target.takes_errors:
                left = [row for row in left if row.status == "succeeded"]
            # Rows of one batch may have been slow without those of the next being so.
            max_rows = min(2 * max_rows, _BATCH_ROWS)
            num_waits = 0
            while left:
                part = left[:max_rows]
                before_batch()
                try:
                    num_taken, refused = _write_batch(connection, part, store)
                except psycopg.errors.QueryCanceled as error:
                    if not may_wait() or num_late == _MAX_LATE_ROWS:
                        raise
                    if len(part) > 1:
                        max_rows = len(part) // 2
                        continue
                    store([])
                    num_late += 1
                    num_taken, refused = 0, [_refusal(part[0], error)]
                except psycopg.Error as error:
                    num_waits += 1
                    if not _is_locked(error) or num_waits == _MAX_LOCK_WAITS or not may_wait():
                        raise
                    continue
                left, num_waits = left[len(part) :], 0
                counts.add(len(part), num_taken, refused)
                refused_in_a_row = [*refused_in_a_row, *refused] if len(refused) == len(part) else []
                if len(refused_in_a_row) >= _BATCH_ROWS:
                    raise StorageError(
                        f"{target.table} refused {len(refused_in_a_row)} results one after another, first "
                        f"{refused_in_a_row[0]}, and no more were tried; correct the table, "
                        "then write back again."
                    )


def _write_batch(
    connection: psycopg.Connection, rows: Sequence[ResultRow], store: Callable[[Sequence[ResultRow]], int]
) -> tuple[int, list[str]]:
    """Commits what the table takes of a batch; how many rows, and what it refused and why."""
    num_taken = 0
    refused: list[str] = []

    def store_part(part: Sequence[ResultRow]) -> None:
        nonlocal num_taken
        num_taken += store(part)

    def on_refused(row: ResultRow, error: Exception) -> None:
        # Without rows the statement still needs the table, its columns and the rights, but asks no row's
        # trigger or policy: it fails where no row could be written.
        store([])
        refused.append(_refusal(row, error))

    with connection.transaction():
        # A constraint that waits for the commit would take the whole batch with it.
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        store_all(connection, rows, store_part, on_refused, passes=_is_no_rows_fault)
    return num_taken, refused


def _is_no_rows_fault(error: Exception) -> bool:
    """Whether it is of the server or of the moment: something ran out, took too long or is locked."""
    return isinstance(error, psycopg.Error) and (
        _is_locked(error) or (error.sqlstate or "").startswith(_ENDED_BY_THE_SERVER)
    )


def _is_locked(error: psycopg.Error) -> bool:
    return (error.sqlstate or "").startswith(_LOCKED)


def _has_own_key(row: ResultRow) -> bool:
    return bool(row.custom_id) and row.error_code != _NOT_A_WORD_OF_THE_SOURCE.value


def _batches(rows: Iterable[ResultRow]) -> Iterator[list[ResultRow]]:
    batch: list[ResultRow] = []
    num_chars = 0
    for row in rows:
        batch.append(row)
        num_chars += len(row.output_text or "")
        if len(batch) >= _BATCH_ROWS or num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _values(target: WriteBackTarget, job_id: str, model: str, rows: Sequence[ResultRow]) -> list[list[Any]]:
    by_field: dict[str, Callable[[ResultRow], Any]] = {
        "text": lambda row: row.output_text,
        "status": lambda row: row.status,
        "error": lambda row: row.error_message,
        "model": lambda row: model,
        "job_id": lambda row: job_id,
        "finished_at": lambda row: row.finished_at,
    }
    return [[row.custom_id for row in rows]] + [
        [by_field[name](row) for row in rows] for name in target.columns
    ]


@contextmanager
def _connected(target: WriteBackTarget) -> Iterator[psycopg.Connection]:
    url = plain_url(target.url)
    if url is None:
        raise ConfigurationError(
            "The URL of a write_back connection must start with postgresql://; correct it."
        )
    try:
        with psycopg.connect(url, autocommit=True, **connect_options(url)) as connection:
            connection.execute(f"SET statement_timeout = {_STATEMENT_TIMEOUT_MS}")
            connection.execute(f"SET lock_timeout = {_LOCK_TIMEOUT_MS}")
            yield connection
    except psycopg.Error as error:
        raise _target_error(error, target) from error


def _target_error(error: psycopg.Error, target: WriteBackTarget) -> StorageError:
    if "authentication failed" in str(error):
        return StorageError(
            f"The server of {target.table} refused the user or password; correct the connection's URL."
        )
    ran_out = what_ran_out(error)
    if ran_out is not None:
        return StorageUnavailableError(
            f"The server of {target.table} has run out of something ({ran_out}); write back again when it "
            "has more room, memory or connections."
        )
    if _is_locked(error):
        return StorageUnavailableError(
            f"{target.table} is locked by another transaction; end that one and write back again."
        )
    if isinstance(error, psycopg.errors.QueryCanceled):
        return StorageUnavailableError(
            f"{target.table} took longer than {_STATEMENT_TIMEOUT_MS // 1_000} s for a statement, or it was "
            "cancelled; make its triggers faster, or write back again when its server has less to do."
        )
    if isinstance(error, psycopg.OperationalError):
        return StorageUnavailableError(
            f"The server of {target.table} did not answer or broke off; write back again later."
        )
    return StorageError(f"{target.table} cannot be written ({_reason(error)}).")


def _refusal(row: ResultRow, error: Exception) -> str:
    return f"{row.custom_id!r} ({_reason(error)})"


def _reason(error: Exception) -> str:
    if isinstance(error, psycopg.Error):
        return without_values(error.diag.message_primary) or type(error).__name__
    return type(error).__name__
