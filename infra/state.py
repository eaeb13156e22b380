"""The state folder of one machine's stack: where it lies, its ports and passwords, and the lock around changes.

.blend/
  stack.json        ports and generated passwords (mode 0600)
  lock              held while a stack is brought up or down
  processes/        one record per service that was started
  logs/             one file per service
  postgres/ s3/ prefect/
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from urllib.parse import quote

from blend_core.errors import ServiceError

DATABASE_NAME = "blend"
OWNER_ROLE = "blend"
READER_ROLE = "blend_reader"
BUCKET_NAME = "blend"
REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class ExternalServices:
    """What the user runs himself. A service whose URL is given here is not started.

    Attributes:
        database_url: Postgres of the platform's tables.
        read_only_database_url: the same database through its read-only role, if there is one.
        s3_endpoint_url: an S3 endpoint; the other `s3_` values count only together with it.
        s3_access_key: None leaves credentials to boto3's own chain.
        s3_secret_key: goes with `s3_access_key`.
        s3_bucket: the bucket for shards and outputs.
        s3_region: the endpoint's region.
        prefect_api_url: a Prefect server's API, ending in `/api`.
    """

    database_url: str | None = field(default=None, repr=False)
    read_only_database_url: str | None = field(default=None, repr=False)
    s3_endpoint_url: str | None = None
    s3_access_key: str | None = field(default=None, repr=False)
    s3_secret_key: str | None = field(default=None, repr=False)
    s3_bucket: str = BUCKET_NAME
    s3_region: str = REGION
    prefect_api_url: str | None = None


@dataclass(frozen=True, slots=True)
class StackState:
    """Where the services are, embedded ones and external ones alike. Secrets are left out of its `repr`.

    Attributes:
        database_url: `postgresql://` URL of the owner of the platform's tables.
        read_only_database_url: the same database for the role `blend_reader`; None where an external database names none.
        s3_endpoint_url: `http(s)://host:port`.
        s3_access_key: None leaves credentials to boto3's own chain (external endpoints only).
        s3_secret_key: goes with `s3_access_key`.
        s3_bucket: exists once `up` has returned (embedded endpoint).
        s3_region: the endpoint's region.
        prefect_api_url: ends in `/api`.
    """

    database_url: str = field(repr=False)
    read_only_database_url: str | None = field(repr=False)
    s3_endpoint_url: str
    s3_access_key: str | None = field(repr=False)
    s3_secret_key: str | None = field(repr=False)
    s3_bucket: str
    s3_region: str
    prefect_api_url: str

    @property
    def prefect_ui_url(self) -> str:
        """The address of Prefect's pages for a browser."""
        return self.prefect_api_url.removesuffix("/").removesuffix("/api")


@dataclass(frozen=True, slots=True)
class StackConfig:
    """What `stack.json` remembers. Made once; a port changes only when a stranger took it while the service was down.

    Attributes:
        postgres_port: loopback port.
        s3_port: loopback port.
        prefect_port: loopback port.
        superuser_password: Postgres role `postgres`.
        owner_password: Postgres role `blend`.
        reader_password: Postgres role `blend_reader`.
        s3_access_key: of the S3 server's one user.
        s3_secret_key: of the S3 server's one user.
        postgres_root: folder of Postgres' data; remembered so that data is found again after the folder moved.
    """

    postgres_port: int
    s3_port: int
    prefect_port: int
    superuser_password: str = field(repr=False)
    owner_password: str = field(repr=False)
    reader_password: str = field(repr=False)
    s3_access_key: str = field(repr=False)
    s3_secret_key: str = field(repr=False)
    postgres_root: str

    @property
    def database_url(self) -> str:
        """The owner's URL."""
        return self._database_url(OWNER_ROLE, self.owner_password, DATABASE_NAME)

    @property
    def read_only_database_url(self) -> str:
        """The reader's URL."""
        return self._database_url(READER_ROLE, self.reader_password, DATABASE_NAME)

    @property
    def superuser_database_url(self) -> str:
        """The superuser's URL of the database `postgres`: for making roles and databases only."""
        return self._database_url("postgres", self.superuser_password, "postgres")

    @property
    def s3_endpoint_url(self) -> str:
        """The S3 server's URL."""
        return f"http://127.0.0.1:{self.s3_port}"

    @property
    def prefect_api_url(self) -> str:
        """The Prefect server's API URL."""
        return f"http://127.0.0.1:{self.prefect_port}/api"

    def _database_url(self, role: str, password: str, database: str) -> str:
        return f"postgresql://{role}:{quote(password, safe='')}@127.0.0.1:{self.postgres_port}/{database}"


class StateFolder:
    """One state folder on disk. Nothing is made before `create` is called."""

    __slots__ = ("home",)

    def __init__(self, home: Path) -> None:
        self.home = home.expanduser().absolute()

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that name this folder on this machine."""
        return hashlib.sha256(os.fsencode(self.home.resolve())).hexdigest()[:12]

    def create(self) -> None:
        """Make the folder and its parts, closed to other users; harmless when they exist.

        Raises:
            ServiceError: the place is not writable.
        """
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            # Root runs Postgres as another user, who has to pass through to its data and sees nothing on the way.
            self.home.chmod(0o711 if os.geteuid() == 0 else 0o700)
            for part in ("processes", "logs", "s3", "prefect"):
                (self.home / part).mkdir(mode=0o700, exist_ok=True)
            (self.home / ".gitignore").write_text("*\n")
        except OSError as error:
            raise ServiceError(
                f"The state folder {self.home} cannot be made ({error.strerror}); set BLEND_HOME to a writable folder."
            ) from error

    def log_file(self, service: str) -> Path:
        """The log of one service."""
        return self.home / "logs" / f"{service}.log"

    def load(self) -> StackConfig | None:
        """The remembered ports and passwords, or None before the first `up`.

        Raises:
            ServiceError: the file is there and cannot be understood.
        """
        path = self.home / "stack.json"
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ServiceError(
                f"{path} cannot be read; run as the user who made it, or restore it."
            ) from error
        try:
            return StackConfig(**{name.name: values[name.name] for name in fields(StackConfig)})
        except (KeyError, TypeError) as error:
            raise ServiceError(f"{path} lacks the entry {error}; restore it.") from error

    def save(self, config: StackConfig) -> None:
        """Write `stack.json` in one step: a reader sees the old file or the new one."""
        temporary = self.home / "stack.json.new"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(config), file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.home / "stack.json")

    def load_or_create(self, postgres_root: Callable[[], Path]) -> StackConfig:
        """The remembered values; at the first call made and saved. Call under the lock.

        Args:
            postgres_root: chooses where Postgres' data goes; asked once in the folder's life.
        """
        config = self.load()
        if config is None:
            ports = free_ports(3)
            config = StackConfig(
                postgres_port=ports[0],
                s3_port=ports[1],
                prefect_port=ports[2],
                superuser_password=secrets.token_urlsafe(24),
                owner_password=secrets.token_urlsafe(24),
                reader_password=secrets.token_urlsafe(24),
                s3_access_key=secrets.token_hex(10).upper(),
                s3_secret_key=secrets.token_urlsafe(30),
                postgres_root=str(postgres_root()),
            )
            self.save(config)
        return config

    def with_free_port(self, config: StackConfig, entry: str) -> StackConfig:
        """`config`, with another port saved under `entry` if a stranger listens on the remembered one."""
        if is_port_free(getattr(config, entry)):
            return config
        taken = {config.postgres_port, config.s3_port, config.prefect_port}
        port = next(port for port in free_ports(4) if port not in taken)
        config = replace(config, **{entry: port})
        self.save(config)
        return config

    @contextmanager
    def lock(self, waiting: Callable[[], None], *, timeout_s: float = 300.0) -> Iterator[None]:
        """Hold the folder's lock; the system releases it when the holder dies.

        Args:
            waiting: called once if another process holds the lock.
            timeout_s: how long to wait for it.

        Raises:
            ServiceError: it was not released in time.
        """
        deadline_s = time.monotonic() + timeout_s
        told = False
        with (self.home / "lock").open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if not told:
                        waiting()
                        told = True
                    if time.monotonic() > deadline_s:
                        raise ServiceError(
                            f"Another command has been changing the stack in {self.home} for {timeout_s:.0f} s; "
                            "end it and try again."
                        ) from None
                    time.sleep(0.1)
            yield

    def erase(self) -> None:
        """Remove the folder and Postgres' data with everything in them. Stop the services first."""
        config = self.load()
        if config is not None:
            shutil.rmtree(config.postgres_root, ignore_errors=True)
        shutil.rmtree(self.home, ignore_errors=True)


def default_home(blend_home: Path | None, working_directory: Path) -> Path:
    """The state folder: BLEND_HOME where it is set, else `.blend` of the project one works in."""
    return blend_home if blend_home is not None else working_directory / ".blend"


def is_port_free(port: int) -> bool:
    """Whether a server may listen on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_ports(num_ports: int) -> list[int]:
    """Different free loopback ports, below the range that systems lend to outgoing connections."""
    ports: list[int] = []
    while len(ports) < num_ports:
        port = 15_000 + secrets.randbelow(15_000)
        if port not in ports and is_port_free(port):
            ports.append(port)
    return ports
