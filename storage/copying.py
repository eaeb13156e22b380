"""COPY, and what to do when one row of many is refused."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg import sql

Row = TypeVar("Row")

# Postgres counts microseconds from the year 2000.
_POSTGRES_EPOCH_S = 946_684_800


def copy_rows(
    connection: psycopg.Connection, table: str, columns: Mapping[str, str], rows: Iterable[Sequence[Any]]
) -> None:
    """Binary COPY of rows into a table, in the connection's transaction: half the cost of COPY as text.

    Args:
        connection: the connection.
        table: name of the table.
        columns: Postgres type of each column, in the order of a row's values. Values of a `timestamptz` come
            as `instant_us` gives them.
        rows: the rows.
    """
    statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
        sql.Identifier(table), sql.SQL(", ").join(map(sql.Identifier, columns))
    )
    # On the wire a timestamp is an eight-byte integer, so it needs no datetime on the way.
    types = ["int8" if kind == "timestamptz" else kind for kind in columns.values()]
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        copy.set_types(types)
        write_row = copy.write_row
        for row in rows:
            write_row(row)


def instant_us(epoch_s: float | None) -> int | None:
    """Seconds since 1970 as Postgres counts time. Raises `ValueError` or `OverflowError` for nan and
    infinity."""
    return None if epoch_s is None else int((epoch_s - _POSTGRES_EPOCH_S) * 1e6)


def is_of_connection(error: Exception) -> bool:
    """Whether an error is one of the connection or of what runs the server, and not of what was sent."""
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)


def store_all(
    connection: psycopg.Connection,
    rows: Sequence[Row],
    store: Callable[[Sequence[Row]], None],
    refused: Callable[[Row, Exception], None],
    *,
    passes: Callable[[Exception], bool] = is_of_connection,
) -> None:
    """Stores rows together; where some are refused, halves until only those are left out.

    Each attempt is a savepoint of the connection's transaction, so a row at fault takes no other with it.
    Where the connection is lost, the error passes through.

    Args:
        connection: in a transaction.
        rows: what to store.
        store: stores any part of the rows, or raises.
        refused: is told of each single row that cannot be stored, after its savepoint was rolled back.
        passes: which other errors are no row's fault and pass through.
    """
    if not rows:
        return
    try:
        with connection.transaction():
            store(rows)
    except (psycopg.Error, ValueError, OverflowError, TypeError) as error:
        if connection.closed or passes(error):
            raise
        if len(rows) == 1:
            refused(rows[0], error)
            return
        middle = len(rows) // 2
        store_all(connection, rows[:middle], store, refused, passes=passes)
        store_all(connection, rows[middle:], store, refused, passes=passes)
