"""Results upserted into a table of the user's, in bounded batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from blend_core.errors import ConfigurationError, RequestErrorCode, StorageError, StorageUnavailableError
from storage.copying import store_all
from storage.postgres_connection import connect_options, plain_url, what_ran_out
from storage.postgres_text import without_values
from storage.results import ResultRow

_BATCH_ROWS = 500
_BATCH_CHARS = 4 << 20
_STATEMENT_TIMEOUT_MS = 60_000
_NUM_NAMED_IDS = 3
_NOT_A_WORD_OF_THE_SOURCE = RequestErrorCode.DUPLICATE_CUSTOM_ID
_TEXT, _ENUM, _TIME = "S", "E", "D"  # pg_type.typcategory


@dataclass(frozen=True, slots=True)
class WriteBackTarget:
    """A table of the user's and what its columns take.

    Attributes:
        url: Postgres URL.
        table: `table` or `schema.table`, exactly as it is named there.
        key_column: unique column that takes `custom_id`.
        columns: column by field of a result: text, status, error, model, job_id, finished_at.
    """

    url: str = field(repr=False)
    table: str
    key_column: str
    columns: Mapping[str, str]

    @property
    def takes_errors(self) -> bool:
        """Whether requests without an answer are written: only where a column tells them apart."""
        return "status" in self.columns or "error" in self.columns


@dataclass(frozen=True, slots=True)
class WriteBackCounts:
    """What came of it.

    Attributes:
        num_written: rows that are in the table.
        num_refused: rows that the table refused.
        num_without_key: requests that have no `custom_id`, or another request's.
        refused: the first refused ids with the server's reason, in one sentence; None where there are none.
    """

    num_written: int
    num_refused: int
    num_without_key: int
    refused: str | None


def check_target(target: WriteBackTarget) -> None:
    """Checks that table, columns, unique key and rights are there.

    Raises:
        ConfigurationError: names what is missing.
        StorageUnavailableError: the server did not answer.
    """
    with _connected(target) as connection:
        _columns(connection, target)


def write_results(
    target: WriteBackTarget, job_id: str, model: str, rows: Iterable[ResultRow]
) -> WriteBackCounts:
    """Upserts results by key, each batch in a transaction of its own. Doing it again changes nothing.

    A row that is there keeps its other columns; one that is not is inserted. A row that the table refuses is
    counted and takes no other with it.

    Raises:
        ConfigurationError: the table has no such columns.
        StorageError: the table cannot be written.
        StorageUnavailableError: the server did not answer or broke off; what was written stays.
    """
    num_written = num_without_key = num_refused = 0
    refused: list[str] = []

    def on_refused(row: ResultRow, error: Exception) -> None:
        nonlocal num_refused
        if isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith("42"):
            raise error
        num_refused += 1
        if len(refused) < _NUM_NAMED_IDS:
            refused.append(f"{row.custom_id!r} ({_reason(error)})")

    with _connected(target) as connection:
        statement = _statement(target, _columns(connection, target))
        for batch in _batches(rows):
            chosen = [row for row in batch if _has_own_key(row)]
            num_without_key += len(batch) - len(chosen)
            if not target.takes_errors:
                chosen = [row for row in chosen if row.status == "succeeded"]
            before = num_refused

            def store(part: Sequence[ResultRow]) -> None:
                connection.execute(statement, _values(target, job_id, model, part))

            with connection.transaction():
                # A constraint that waits for the commit would take the whole batch with it.
                connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
                store_all(connection, chosen, store, on_refused)
            num_written += len(chosen) - (num_refused - before)
    sentence = None
    if refused:
        more = f" and {num_refused - len(refused)} more" if num_refused > len(refused) else ""
        sentence = f"{target.table} refused {', '.join(refused)}{more}; correct the table or the ids."
    return WriteBackCounts(num_written, num_refused, num_without_key, sentence)


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


@dataclass(frozen=True, slots=True)
class _Column:
    type_name: str
    category: str


def _statement(target: WriteBackTarget, columns: Mapping[str, _Column]) -> sql.Composed:
    """Update what is there, insert the rest. A plain upsert would ask a row that is there for every column
    that must not be NULL.
    """
    names = [target.key_column, *target.columns.values()]
    given = [sql.SQL(f"given_{number}") for number in range(len(names))]
    types = ["text"] + ["timestamptz" if name == "finished_at" else "text" for name in target.columns]
    values = [_cast(column, columns[name]) for column, name in zip(given, names, strict=True)]
    identifiers = [_name(name) for name in names]
    return sql.SQL(
        "WITH given ({given}) AS (SELECT * FROM unnest({arrays})),"
        " updated AS (UPDATE {table} AS target SET {assignments} FROM given"
        " WHERE target.{key} = {key_value} RETURNING target.{key} AS key)"
        # The key of a row that is not there may be one that the table would make itself.
        " INSERT INTO {table} ({names}) OVERRIDING SYSTEM VALUE SELECT {values} FROM given"
        " WHERE NOT EXISTS (SELECT FROM updated WHERE updated.key = {key_value})"
        " ON CONFLICT ({key}) DO UPDATE SET {excluded}"
    ).format(
        given=sql.SQL(", ").join(given),
        arrays=sql.SQL(", ".join(f"%s::{kind}[]" for kind in types)),
        table=_name(*_parts(target.table)),
        assignments=sql.SQL(", ").join(
            sql.SQL("{} = {}").format(name, value)
            for name, value in zip(identifiers[1:], values[1:], strict=True)
        ),
        key=identifiers[0],
        key_value=values[0],
        names=sql.SQL(", ").join(identifiers),
        values=sql.SQL(", ").join(values),
        excluded=sql.SQL(", ").join(sql.SQL("{0} = EXCLUDED.{0}").format(name) for name in identifiers[1:]),
    )


def _cast(value: sql.SQL, column: _Column) -> sql.Composable:
    """A text goes into a text column as it is, so that one that is too long is refused and not cut."""
    if column.category == _TEXT:
        return value
    return sql.SQL("{}::{}").format(value, sql.SQL(column.type_name.replace("%", "%%")))


def _name(*parts: str) -> sql.SQL:
    """A quoted name for a statement that has parameters, where a `%` is one unless it is doubled."""
    return sql.SQL(sql.Identifier(*parts).as_string(None).replace("%", "%%"))


def _parts(table: str) -> list[str]:
    return table.split(".", 1)


def _columns(connection: psycopg.Connection, target: WriteBackTarget) -> dict[str, _Column]:
    """The table's columns by name. Raises `ConfigurationError` where one of the target's cannot be used."""
    name = sql.Identifier(*_parts(target.table)).as_string(connection)
    relation = connection.execute(
        "SELECT oid, relkind IN ('r', 'p') FROM pg_class WHERE oid = to_regclass(%s)", (name,)
    ).fetchone()
    if relation is None:
        raise ConfigurationError(
            f"write_back: there is no table {target.table} (names are taken as written, capitals included); "
            "create it, or correct `table`."
        )
    oid, is_table = relation
    if not is_table:
        raise ConfigurationError(
            f"write_back: {target.table} is a view or the like, where no key is unique; name the table "
            "behind it as `table`."
        )
    found = {
        row[0]: row[1:]
        for row in connection.execute(
            "SELECT a.attname, format_type(a.atttypid, a.atttypmod), t.typcategory, a.attgenerated <> '',"
            " a.attidentity = 'a',"
            " has_column_privilege(a.attrelid, a.attnum, 'INSERT')"
            " AND has_column_privilege(a.attrelid, a.attnum, 'UPDATE'),"
            " EXISTS (SELECT FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisunique"
            " AND i.indimmediate AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum AND i.indpred IS NULL)"
            " FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid"
            " WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped",
            (oid,),
        )
    }
    fields = {target.key_column: "custom_id"} | {column: name for name, column in target.columns.items()}
    missing = [column for column in fields if column not in found]
    if missing:
        raise ConfigurationError(
            f"write_back: {target.table} has no column {', '.join(missing)}; add it, or correct `columns`."
        )
    for column, what in fields.items():
        type_name, category, is_generated, is_own_identity, is_allowed, is_unique = found[column]
        if is_generated or (is_own_identity and column != target.key_column):
            raise ConfigurationError(f"write_back: {target.table}.{column} is generated and takes no value.")
        if not is_allowed:
            raise ConfigurationError(
                f"write_back: the login may not write {target.table}.{column}; grant it INSERT and UPDATE."
            )
        if column == target.key_column:
            if not is_unique:
                raise ConfigurationError(
                    f"write_back: {target.table}.{column} is not unique, and rows are found by it; make it "
                    "the primary key or give it a unique index."
                )
        elif category not in {"status": (_TEXT, _ENUM), "finished_at": (_TEXT, _TIME)}.get(what, (_TEXT,)):
            raise ConfigurationError(
                f"write_back: {target.table}.{column} is of type {type_name} and cannot take `{what}`."
            )
    return {column: _Column(found[column][0], found[column][1]) for column in fields}


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
    if isinstance(error, psycopg.OperationalError):
        return StorageUnavailableError(
            f"The server of {target.table} did not answer, broke off or took too long; write back again "
            "later."
        )
    return StorageError(f"{target.table} cannot be written ({_reason(error)}).")


def _reason(error: Exception) -> str:
    if isinstance(error, psycopg.Error):
        return without_values(error.diag.message_primary) or type(error).__name__
    return type(error).__name__
