"""Rows of a user's read-only query, streamed."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.abc import AdaptContext, Buffer
from psycopg.abc import Loader as AbstractLoader
from psycopg.adapt import Loader
from psycopg.pq import Format
from psycopg.rows import dict_row

from blend_core.errors import SourceError, SourceUnavailableError
from storage.postgres_connection import connect_options, plain_url, what_ran_out
from storage.postgres_text import without_values

_CURSOR = "blend_source"
# The second where the server refused the connection itself, which psycopg tells no SQLSTATE of.
_NO_CONNECTION = ("53300", "")
_TYPES_WIDER_THAN_PYTHONS = (
    "date",
    "time",
    "timetz",
    "timestamp",
    "timestamptz",
    "interval",
    "json",
    "jsonb",
)


def stream_rows(url: str, query: str, params: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Streams a query's rows by a server-side cursor in a READ ONLY transaction.

    The server itself refuses anything but one statement that reads: the query becomes the cursor's
    declaration. One row is in memory at a time, however large it is. A value that Python has no object for
    (`infinity`, a date before Christ) comes as the server's text.

    Args:
        url: `postgresql://…` of the source.
        query: one SELECT (or VALUES, TABLE, WITH … SELECT).
        params: bound as `%(name)s`; then a literal `%` of the query is written `%%`.

    Raises:
        SourceError: the server refused the query, or has too little memory or room for it; the message is the
            server's own, without values of rows.
        SourceUnavailableError: the server did not answer, broke off, or has no connection left.
    """
    plain = plain_url(url)
    if plain is None:
        raise SourceError("The URL of a SQL source must start with postgresql://; correct it.")
    try:
        with psycopg.connect(plain, **connect_options(plain)) as connection:
            connection.read_only = True
            _load_text_where_python_ends(connection)
            with connection.cursor(name=_CURSOR, row_factory=dict_row) as declared:
                declared.execute(query, params)
                _check_columns(declared)
                fetch_all = sql.SQL("FETCH ALL FROM {}").format(sql.Identifier(_CURSOR))
                yield from connection.cursor(row_factory=dict_row).stream(fetch_all)
    except psycopg.Error as error:
        raise _source_error(error) from error


@dataclass(frozen=True, slots=True)
class NewRows:
    """Which rows of a query are new.

    Attributes:
        column: the watermark column.
        id_column: tells rows of equal watermarks apart.
        after: watermark of what was read before; None for nothing.
        edge_ids: ids of the rows at `after` that were read.
        leftover_ids: ids to read again in any case.
    """

    column: str
    id_column: str
    after: str | None = None
    edge_ids: Sequence[str] = ()
    leftover_ids: Sequence[str] = ()


AT_WATERMARK = "blend at watermark"


def newest_value(url: str, query: str, new: NewRows) -> str | None:
    """The greatest value of the watermark column beyond what was read before, as JSON writes it; None where
    there is none.

    Raises what `stream_rows` raises.
    """
    # Not one that equals it: `1.00` would take the place of `1.0`, another time zone that of the first.
    since = "" if new.after is None else "AND source.{column} > %(after)s"
    # Not max(), which not every type with an order has.
    statement = _over(
        query,
        "SELECT to_jsonb(source.{column}) #>> '{{}}' AS newest",
        f"WHERE source.{{column}} IS NOT NULL {since} ORDER BY source.{{column}} DESC LIMIT 1",
        new,
    )
    for row in stream_rows(url, statement, {"after": new.after}):
        return str(row["newest"])
    return None


def stream_new_rows(url: str, query: str, new: NewRows, up_to: str | None) -> Iterator[dict[str, Any]]:
    """Streams the rows that are new up to a watermark, and the leftovers.

    Each row has one more column, `AT_WATERMARK`: whether its watermark is `up_to`. Rows without a watermark
    (NULL) are not new; those without an id that are at `after` are new each time.

    Raises what `stream_rows` raises.
    """
    # As its type writes it, which is what becomes of it as an id: a cast would take away a char's padding.
    identity = "CASE WHEN source.{id_column} IS NOT NULL THEN concat(source.{id_column}) END"
    since = "true"
    if new.after is not None:
        since = (
            "(source.{column} > %(after)s OR "
            # Nobody can tell whether one without an id was read: told again rather than never.
            f"source.{{column}} = %(after)s AND ({identity} = ANY(%(edge_ids)s::text[])) IS NOT TRUE)"
        )
    statement = _over(
        query,
        "SELECT source.*, coalesce(source.{column} = %(up_to)s, false) AS {at_watermark}",
        f"WHERE source.{{column}} <= %(up_to)s AND {since}"
        f" OR {identity} = ANY(%(leftover_ids)s::text[]) AND (source.{{column}} <= %(up_to)s) IS NOT FALSE",
        new,
    )
    params = {
        "after": new.after,
        "up_to": up_to,
        "edge_ids": list(new.edge_ids),
        "leftover_ids": list(new.leftover_ids),
    }
    return stream_rows(url, statement, params)


def _over(query: str, select: str, where: str, new: NewRows) -> str:
    """A query over the user's query, whose own `%` are no parameters."""
    names = {
        "column": _quoted(new.column),
        "id_column": _quoted(new.id_column),
        "at_watermark": _quoted(AT_WATERMARK),
    }
    inner = query.strip().rstrip(";").replace("%", "%%")
    # The line ends close a comment at the end of the query.
    return f"{select.format(**names)} FROM (\n{inner}\n) AS source {where.format(**names)}"


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string(None).replace("%", "%%")


def _load_text_where_python_ends(connection: psycopg.Connection) -> None:
    for name in _TYPES_WIDER_THAN_PYTHONS:
        oid = connection.adapters.types[name].oid
        loader = connection.adapters.get_loader(oid, Format.TEXT)
        assert loader is not None
        connection.adapters.register_loader(oid, _or_text(loader))


def _or_text(loader: type[AbstractLoader]) -> type[Loader]:
    """A loader that gives the server's text of a value that `loader` cannot load."""

    class OrText(Loader):
        def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
            super().__init__(oid, context)
            self._exact = loader(oid, context)

        def load(self, data: Buffer) -> Any:
            try:
                return self._exact.load(data)
            except (psycopg.DataError, ValueError, OverflowError, RecursionError):
                return bytes(data).decode(errors="replace")

    return OrText


def _check_columns(cursor: psycopg.ServerCursor[dict[str, Any]]) -> None:
    names = Counter(column.name for column in cursor.description or ())
    twice = sorted(name for name, number in names.items() if number > 1)
    if twice:
        raise SourceError(f"The query returns the column {twice[0]} twice; name its columns apart with AS.")


def _source_error(error: psycopg.Error) -> SourceError:
    primary = without_values(error.diag.message_primary)
    sqlstate = error.sqlstate or ""
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return SourceError(f"The query writes ({primary}); a source only reads.")
    if "authentication failed" in str(error):
        return SourceError("The SQL source refused the user or password; correct its URL.")
    ran_out = what_ran_out(error)
    # Only a connection becomes free by waiting: room and memory are what the query itself takes.
    if ran_out is not None and sqlstate in _NO_CONNECTION:
        return SourceUnavailableError(
            f"The server of the SQL source has no connection left ({ran_out}); let it allow more of them."
        )
    if ran_out is not None:
        return SourceError(
            f"The server of the SQL source has run out of what the query needs ({ran_out}); let the query "
            "take less, or give the server more memory or room, and submit the job again."
        )
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and not sqlstate.startswith(
        ("22", "42", "57014")
    ):
        return SourceUnavailableError(
            "The SQL source did not answer or broke off; check its URL and its server."
        )
    return SourceError(f"The query was refused ({primary or type(error).__name__}); correct it.")
