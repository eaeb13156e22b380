"""The database: connections, the locked upgrade, and the read-only login."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources

import alembic.command
import alembic.config
import psycopg
import sqlalchemy
from alembic.runtime.migration import MigrationContext
from psycopg import sql

from blend_core.errors import ConfigurationError, StorageError, StorageUnavailableError
from storage.postgres_connection import connect_options, plain_url, what_ran_out
from storage.postgres_text import without_values

# Any number will do, as long as every process uses the same one.
_UPGRADE_LOCK = 0x626C656E64
_LOOK_TIMEOUT_S = 2
READ_ONLY_LOGIN = "blend_reader"


class Database:
    """One Postgres database. Opens connections on demand; safe to share between threads, not across a
    fork."""

    __slots__ = ("_engine", "_url")

    def __init__(self, url: str) -> None:
        """Takes `postgresql://`, `postgres://` or `postgresql+psycopg://`; connects to nothing yet."""
        self._url = _parse_url(url)
        self._engine = sqlalchemy.create_engine(
            self._url,
            pool_pre_ping=True,
            hide_parameters=True,
            pool_size=4,
            connect_args=connect_options(url),
        )

    @property
    def url(self) -> str:
        """`postgresql://…` with the password: for child processes, never for a log or message."""
        return self._url.set(drivername="postgresql").render_as_string(hide_password=False)

    @property
    def safe_url(self) -> str:
        """The same with the password masked, for people."""
        return self._url.set(drivername="postgresql").render_as_string(hide_password=True)

    @contextmanager
    def connect(self) -> Iterator[sqlalchemy.Connection]:
        """A connection in one transaction: committed at the end, rolled back on an error.

        Raises:
            StorageUnavailableError: the server did not answer or broke off.
            StorageError: the server refused a statement.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except sqlalchemy.exc.DBAPIError as error:
            cause = error.orig
            raise self._translate(cause if isinstance(cause, psycopg.Error) else error) from error

    @contextmanager
    def raw(self) -> Iterator[psycopg.Connection]:
        """A psycopg connection of its own in one transaction, for COPY and server-side cursors.

        Raises what `connect` raises.
        """
        try:
            with self.open_raw() as connection:
                yield connection
        except psycopg.Error as error:
            raise self._translate(error) from error

    def open_raw(self) -> psycopg.Connection:
        """A psycopg connection that the caller closes; psycopg's own errors pass through it, not through
        this call.

        Raises:
            StorageUnavailableError: the server did not answer.
        """
        try:
            return psycopg.connect(self.url, **connect_options(self.url))
        except psycopg.Error as error:
            raise self._translate(error) from error

    def is_away(self) -> bool:
        """Whether the server does not answer now; known within `_LOOK_TIMEOUT_S`, of no use for long."""
        try:
            psycopg.connect(self.url, connect_timeout=_LOOK_TIMEOUT_S, application_name="blend").close()
        except psycopg.OperationalError:
            return True
        return False

    def upgrade(self) -> str:
        """Brings the tables to the newest revision and returns it.

        Any number of processes may call this at once: one upgrades under an advisory lock, the others wait
        and find nothing left to do.
        """
        with self._locked() as connection:
            config = alembic.config.Config()
            folder = str(resources.files("migrations"))
            config.set_main_option("script_location", folder.replace("%", "%%"))
            config.set_main_option("path_separator", "os")
            config.attributes["connection"] = connection
            alembic.command.upgrade(config, "head")
            connection.commit()
            revision = MigrationContext.configure(connection).get_current_revision()
        assert revision is not None
        return revision

    def current_revision(self) -> str | None:
        """The schema revision of the database, None for an empty one."""
        with self.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()

    def dispose(self) -> None:
        """Closes idle connections. The object stays usable."""
        self._engine.dispose()

    @contextmanager
    def _locked(self) -> Iterator[sqlalchemy.Connection]:
        """A connection that holds the upgrade lock; the caller commits."""
        try:
            with self._engine.connect() as connection:
                connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:key)"), {"key": _UPGRADE_LOCK})
                connection.commit()
                try:
                    yield connection
                finally:
                    connection.rollback()
                    connection.execute(
                        sqlalchemy.text("SELECT pg_advisory_unlock(:key)"), {"key": _UPGRADE_LOCK}
                    )
                    connection.commit()
        except sqlalchemy.exc.DBAPIError as error:
            cause = error.orig
            raise self._translate(cause if isinstance(cause, psycopg.Error) else error) from error
        except psycopg.Error as error:
            raise self._translate(error) from error

    def _translate(self, error: Exception) -> StorageError:
        return storage_error(error, self.safe_url)


def storage_error(error: Exception, safe_url: str) -> StorageError:
    """What a database error means to the caller. Values of rows never reach the message."""
    sqlstate = getattr(error, "sqlstate", None) or ""
    diagnosis = getattr(error, "diag", None)
    primary = without_values(getattr(diagnosis, "message_primary", None))
    if sqlstate in ("28P01", "28000") or "authentication failed" in str(error):
        return StorageError(f"{safe_url} refused the user or password; check BLEND_DATABASE__URL.")
    if sqlstate == "3D000" or ('database "' in str(error) and "does not exist" in str(error)):
        return StorageError(
            f"{safe_url} names a database that does not exist; create it or correct BLEND_DATABASE__URL."
        )
    ran_out = what_ran_out(error)
    if ran_out is not None:
        return StorageUnavailableError(
            f"The database at {safe_url} has run out of something ({ran_out}); give it more room, memory or "
            "connections."
        )
    # An InterfaceError is what a connection says that was lost before.
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or (
        isinstance(error, sqlalchemy.exc.DBAPIError) and error.connection_invalidated
    ):
        return StorageUnavailableError(
            f"The database at {safe_url} did not answer; start it (`blend up`) or correct "
            "BLEND_DATABASE__URL."
        )
    if sqlstate == "42P01":
        return StorageError(f"The tables are missing at {safe_url}; run `blend db upgrade`.")
    if sqlstate in ("42501", "25006"):
        return StorageError(f"The user of {safe_url} may not do this ({primary}); use the owner's URL.")
    if sqlstate.startswith("BL"):
        return StorageError(f"{str(primary).capitalize()}.")
    return StorageError(
        f"The database refused ({sqlstate or type(error).__name__}: {primary or 'no details'})."
    )


def ensure_read_only_login(db: Database, password: str) -> str:
    """Makes sure that the login role `blend_reader` may read every table and view, and no more.

    Where the owner may manage roles, the login is created and given this password, which leaves this process
    only as a SCRAM verifier. Where he may not, an administrator has made the login (with this password), and
    only its rights are set.

    Returns:
        The login's URL of this database.

    Raises:
        StorageError: there is no such login and the owner may not create it.
    """
    login = sql.Identifier(READ_ONLY_LOGIN)
    with db._locked(), db.raw() as connection:
        known = connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (READ_ONLY_LOGIN,)).fetchone()
        verifier = connection.pgconn.encrypt_password(
            password.encode(), READ_ONLY_LOGIN.encode(), b"scram-sha-256"
        ).decode()
        verb = sql.SQL("CREATE" if known is None else "ALTER")
        try:
            with connection.transaction():
                connection.execute(
                    sql.SQL("{} ROLE {} LOGIN PASSWORD {}").format(verb, login, sql.Literal(verifier))
                )
                connection.execute(
                    sql.SQL("ALTER ROLE {} SET default_transaction_read_only = on").format(login)
                )
        except psycopg.errors.InsufficientPrivilege as error:
            if known is None:
                raise StorageError(
                    f"The owner of {db.safe_url} may not create roles; let an administrator create "
                    f"{READ_ONLY_LOGIN} with LOGIN and a password, then repeat this."
                ) from error
        for grant in (
            "GRANT USAGE ON SCHEMA {} TO {}",
            "GRANT SELECT ON ALL TABLES IN SCHEMA {} TO {}",
            "ALTER DEFAULT PRIVILEGES IN SCHEMA {} GRANT SELECT ON TABLES TO {}",
        ):
            connection.execute(sql.SQL(grant).format(sql.Identifier("public"), login))
    url = db._url.set(drivername="postgresql", username=READ_ONLY_LOGIN, password=password)
    return url.render_as_string(hide_password=False)


def _parse_url(url: str) -> sqlalchemy.URL:
    plain = plain_url(url)
    if plain is None:
        raise ConfigurationError(
            "The database URL must start with postgresql://; correct BLEND_DATABASE__URL."
        )
    try:
        return sqlalchemy.make_url(plain).set(drivername="postgresql+psycopg")
    except (sqlalchemy.exc.ArgumentError, ValueError):
        # The library's own message quotes the URL, password included.
        raise ConfigurationError("The database URL cannot be read; correct BLEND_DATABASE__URL.") from None
