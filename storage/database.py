"""The database: connections, the locked upgrade, and the read-only login."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import sqlalchemy


class Database:
    """One Postgres database. Opens connections on demand; safe to share between threads, not across a fork."""

    def __init__(self, url: str) -> None: ...

    @property
    def url(self) -> str:
        """`postgresql://…` with the password: for child processes, never for a log or message."""

    @property
    def safe_url(self) -> str:
        """The same without the password, for people."""

    @contextmanager
    def connect(self) -> Iterator[sqlalchemy.Connection]:
        """A connection in one transaction: committed at the end, rolled back on an error."""

    @contextmanager
    def raw(self) -> Iterator[psycopg.Connection]:
        """A psycopg connection of its own in one transaction, for COPY and server-side cursors."""

    def upgrade(self) -> str:
        """Brings the tables to the newest revision (under an advisory lock) and returns it."""

    def current_revision(self) -> str | None:
        """The schema revision of the database, None for an empty one."""

    def dispose(self) -> None:
        """Closes idle connections."""


def ensure_read_only_login(db: Database, password: str) -> str:
    """Creates or updates the login role `blend_reader` and returns its URL of this database."""
