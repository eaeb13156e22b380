"""The state folder of one machine's stack, and the lock around changes to it.

.blend/
  stack.json        ports and generated passwords (mode 0600)
  lock              held while a stack is brought up or down
  processes/        one record per service that was started
  logs/             one file per service
  postgres/ s3/ prefect/
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path

from blend_core.errors import ServiceError
from infra.ports import free_ports, is_port_free
from infra.state import StackConfig

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Postgres begins a file of its log with 16 MiB.
_LEAST_ROOM_BYTES = 32 << 20


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
            # Root runs Postgres as another user, who has to pass through to its data.
            self.home.chmod(0o711 if os.geteuid() == 0 else 0o700)
            for part in ("processes", "logs", "s3", "prefect"):
                (self.home / part).mkdir(mode=0o700, exist_ok=True)
            (self.home / ".gitignore").write_text("*\n")
        except OSError as error:
            raise ServiceError(
                f"The state folder {self.home} cannot be made ({error.strerror}); "
                "set BLEND_HOME to a writable folder."
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

    @contextmanager
    def lack_of_room_told(self) -> Iterator[None]:
        """What fails in the block since a disk is full is told as that, with the full folder and the
        error's own words.

        Raises:
            ServiceError: no room is left.
        """
        try:
            yield
        except (OSError, ServiceError) as error:
            full = self._full_folder(error)
            if full is None:
                raise
            # Another state folder is of no use where the data of Postgres, or anything else, lies apart.
            elsewhere = (
                ", or name another state folder in BLEND_HOME," if full.is_relative_to(self.home) else ""
            )
            raise ServiceError(
                f"The disk of {full} is full; make room there{elsewhere} and do this again. "
                f"What failed: {error}"
            ) from error

    def _full_folder(self, error: OSError | ServiceError) -> Path | None:
        """The folder whose disk is full, None for none: what the error names, else one of the stack's."""
        if isinstance(error, OSError):
            if error.errno not in _FULL:
                return None
            if isinstance(error.filename, str):
                named = Path(error.filename)
                return named if named.is_dir() else named.parent
        folders = [self.home]
        with suppress(ServiceError):
            config = self.load()
            if config is not None:
                folders.append(Path(config.postgres_root))
        full = [folder for folder in folders if folder.is_dir() and _has_no_room(folder)]
        # A write to a file that is open names none; what is written here is in the state folder.
        return full[0] if full else self.home if isinstance(error, OSError) else None

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
        # A server that was killed in this moment lets go of its port a little later.
        deadline_s = time.monotonic() + 1.0
        while time.monotonic() < deadline_s:
            if is_port_free(getattr(config, entry)):
                return config
            time.sleep(0.05)
        taken = {config.postgres_port, config.s3_port, config.prefect_port}
        port = next(port for port in free_ports(4) if port not in taken)
        config = StackConfig(**{**asdict(config), entry: port})
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
                            f"Another command has been busy with the stack in {self.home} "
                            f"for {timeout_s:.0f} s; end it and try again."
                        ) from None
                    time.sleep(0.1)
            yield

    def erase(self) -> None:
        """Remove the folder and Postgres' data with everything in them. Stop the services first."""
        config = self.load()
        if config is not None:
            shutil.rmtree(config.postgres_root, ignore_errors=True)
        shutil.rmtree(self.home, ignore_errors=True)


def _has_no_room(folder: Path) -> bool:
    return shutil.disk_usage(folder).free < _LEAST_ROOM_BYTES
