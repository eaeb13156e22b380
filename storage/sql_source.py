"""Rows of a user's read-only query, streamed."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import psycopg
from psycopg import sql
from psycopg.abc import AdaptContext, Buffer
from psycopg.abc import Loader as AbstractLoader
from psycopg.adapt import Loader
from psycopg.pq import Format
from psycopg.rows import dict_row

from blend_core.errors import SourceError, SourceUnavailableError
from storage.postgres_text import without_values

_CURSOR = "blend_source"
_CONNECT_TIMEOUT_S = 10
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
        SourceError: the server refused the query; the message is the server's own, without values of rows.
        SourceUnavailableError: the server did not answer, or broke off.
    """
    try:
        with psycopg.connect(
            _plain_url(url), connect_timeout=_CONNECT_TIMEOUT_S, application_name="blend"
        ) as connection:
            connection.read_only = True
            _load_text_where_python_ends(connection)
            with connection.cursor(name=_CURSOR, row_factory=dict_row) as declared:
                declared.execute(query, params)
                _check_columns(declared)
                fetch_all = sql.SQL("FETCH ALL FROM {}").format(sql.Identifier(_CURSOR))
                yield from connection.cursor(row_factory=dict_row).stream(fetch_all)
    except psycopg.Error as error:
        raise _source_error(error) from error


def _plain_url(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise SourceError("The URL of a SQL source must start with postgresql://; correct it.")
    return f"postgresql://{rest}"


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
    if isinstance(error, psycopg.OperationalError) and not sqlstate.startswith(("22", "42", "53", "57014")):
        return SourceUnavailableError(
            "The SQL source did not answer or broke off; check its URL and its server."
        )
    return SourceError(f"The query was refused ({primary or type(error).__name__}); correct it.")
