"""Rows of a user's read-only query, streamed."""

from collections.abc import Iterator, Mapping
from typing import Any


def stream_rows(
    url: str, query: str, params: Mapping[str, Any] | None = None, *, fetch_size: int = 2_000
) -> Iterator[dict[str, Any]]:
    """Streams a query's rows by a server-side cursor in a READ ONLY transaction.

    `params` are bound as `%(name)s` (then a literal `%` is written `%%`). Anything but one reading
    statement, an unknown column and the like raise `SourceError` with the server's own message; a lost or
    refused connection `SourceUnavailableError`.
    """
