"""How every connection to Postgres is made, which URLs are taken, and when a server is gone or full."""

import re
from typing import Any, Final
from urllib.parse import parse_qsl

import psycopg

from storage.postgres_text import without_values

_SCHEMES: Final = ("postgresql", "postgres", "postgresql+psycopg")

_NO_CONNECTION_LEFT: Final = re.compile(
    r"FATAL: +((?:sorry, )?too many (?:clients|connections)[^\n]*|remaining connection slots[^\n]*)"
)

# A host that vanishes says nothing, and by itself the system waits hours for an answer, or a quarter of an
# hour for what it has sent to arrive. With these a connection breaks within half a minute, and whoever waits
# for it learns that the database is away. A query that takes long is no such case: its host answers for it.
_OPTIONS: Final[dict[str, Any]] = {
    "connect_timeout": 10,
    "application_name": "blend",
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


def plain_url(url: str) -> str | None:
    """The URL as psycopg takes it, `postgresql://…`; None where it is not one of Postgres."""
    scheme, separator, rest = url.partition("://")
    return f"postgresql://{rest}" if separator and scheme in _SCHEMES else None


def connect_options(url: str) -> dict[str, Any]:
    """What psycopg is given beside a URL; what the URL says itself is left to it."""
    said = {name for name, _ in parse_qsl(url.partition("?")[2], keep_blank_values=True)}
    return {name: value for name, value in _OPTIONS.items() if name not in said}


def what_ran_out(error: Exception) -> str | None:
    """What a server has run out of (SQLSTATE class 53), in its own words; None where the error is another.

    A server that has no connection left sends a text and no SQLSTATE that psycopg tells.
    """
    if not isinstance(error, psycopg.Error):
        return None
    if (error.sqlstate or "").startswith("53"):
        return without_values(error.diag.message_primary) or type(error).__name__
    refused = _NO_CONNECTION_LEFT.search(str(error)) if error.sqlstate is None else None
    return None if refused is None else refused[1]
