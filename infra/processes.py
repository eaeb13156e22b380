"""Processes that outlive the command which starts them and are found again safely."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from blend_core.errors import ServiceError
from infra.unprivileged import Account

MARKER = "BLENDSERVE_SERVICE"
"""Environment variable that every process of a service carries: `<state folder>:<service>`."""

MAX_LOG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """What is written down about a started process.

    Attributes:
        pid: its process id, also the id of its session and group.
        started_at_s: its start in seconds since the epoch, as the system tells it.
        command: its argument list.
        fingerprint: names the settings it was started with.
    """

    pid: int
    started_at_s: float
    command: list[str]
    fingerprint: str


class ServiceProcess:
    """The process in charge of one service, with everything it starts.

    The process in charge is known by its recorded pid, start time and arguments. Everything it starts carries
    a marker in its environment, so that what it leaves behind when it is killed can be found and ended.
    """

    __slots__ = ("_is_part", "_log_file", "_marker", "_record_file", "name")

    def __init__(
        self,
        name: str,
        home: Path,
        *,
        is_part: Callable[[psutil.Process], bool] | None = None,
    ) -> None:
        """Changes nothing.

        Args:
            name: of the service.
            home: the state folder.
            is_part: recognises processes of the service that hide their environment.
        """
        self.name = name
        self._marker = f"{home.resolve()}:{name}"
        self._record_file = home / "processes" / f"{name}.json"
        self._log_file = home / "logs" / f"{name}.log"
        self._is_part = is_part

    @property
    def marker(self) -> dict[str, str]:
        """What a process carries in its environment as a part of the service."""
        return {MARKER: self._marker}

    @property
    def log_file(self) -> Path:
        """Where its output goes."""
        return self._log_file

    @property
    def pid(self) -> int | None:
        """The pid of the process in charge; None unless it lives."""
        process = self._find()
        return None if process is None else int(process.pid)

    @property
    def since(self) -> datetime | None:
        """When the process in charge started; None unless it lives."""
        process = self._find()
        return None if process is None else datetime.fromtimestamp(process.create_time(), UTC)

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint given at its launch; None unless it lives."""
        record = self._load()
        return record.fingerprint if record is not None and self._find() is not None else None

    def launch(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        working_directory: Path | None = None,
        account: Account | None = None,
        fingerprint: str = "",
    ) -> None:
        """Start it in a session of its own and write it down. What an earlier one left behind is ended first.

        Args:
            command: absolute path of the program, and its arguments; no secrets.
            environment: replaces the caller's environment.
            working_directory: None keeps the caller's.
            account: whom it runs as; None runs it as the caller.
            fingerprint: names the settings it is started with.

        Raises:
            ServiceError: the program cannot be started.
        """
        self.end_leftovers()
        if self._log_file.exists() and self._log_file.stat().st_size > MAX_LOG_BYTES:
            self._log_file.replace(self._log_file.with_suffix(".log.old"))
        try:
            with self._log_file.open("ab") as log:
                process = subprocess.Popen(  # noqa: S603 - a command of ours, no shell
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**environment, **self.marker},
                    cwd=working_directory,
                    start_new_session=True,
                    user=None if account is None else account.uid,
                    group=None if account is None else account.gid,
                    extra_groups=None if account is None else [],
                )
            started_at_s = psutil.Process(process.pid).create_time()
        except (OSError, psutil.Error) as error:
            raise ServiceError(f"{command[0]} cannot be started ({error}); see {self._log_file}.") from error
        # It outlives this object by intent, so the object must not complain that it runs; `_find` reaps it.
        process.returncode = 0
        record = ProcessRecord(process.pid, started_at_s, list(command), fingerprint)
        temporary = self._record_file.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(record)))
        temporary.replace(self._record_file)

    def wait_until(self, is_ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Return as soon as `is_ready()`.

        Raises:
            ServiceError: the process ended, or the time passed; quotes the last line of the log.
        """
        deadline_s = time.monotonic() + timeout_s
        while not is_ready():
            if self._find() is None:
                raise ServiceError(
                    f"{self.name} ended while it started: {self._last_line()} See {self._log_file}."
                )
            if time.monotonic() > deadline_s:
                raise ServiceError(
                    f"{self.name} did not answer within {timeout_s:.0f} s; see {self._log_file}."
                )
            time.sleep(0.05)

    def stop(self, signals: Sequence[tuple[int, float]]) -> None:
        """End the process in charge, then everything it started; harmless when nothing runs.

        Args:
            signals: sent one after the other, each with the seconds to wait for the end; SIGKILL follows.
        """
        process = self._find()
        if process is not None:
            for number, wait_s in (*signals, (signal.SIGKILL, 5.0)):
                try:
                    process.send_signal(number)
                except psutil.NoSuchProcess:
                    break
                if self._wait_for_end(wait_s):
                    break
        self.end_leftovers()
        self._record_file.unlink(missing_ok=True)

    def _wait_for_end(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self._find() is not None:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.02)
        return True

    def _load(self) -> ProcessRecord | None:
        try:
            return ProcessRecord(**json.loads(self._record_file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def _find(self) -> psutil.Process | None:
        """The process in charge, if it lives and is the recorded one."""
        record = self._load()
        if record is None:
            return None
        with contextlib.suppress(ChildProcessError):  # started by another command: not ours to reap
            os.waitpid(record.pid, os.WNOHANG)
        try:
            process = psutil.Process(record.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            # A corrected clock moves the start times that the system tells by seconds; a reused pid differs
            # in its arguments, too. The program's path is left out: a framework build of Python changes it.
            # A program that is being loaded has none for a moment.
            arguments = process.cmdline()[1:]
            is_same = abs(process.create_time() - record.started_at_s) < 60.0 and (
                not arguments or arguments == record.command[1:]
            )
        except psutil.Error:
            return None
        return process if is_same else None

    def has_started(self, pid: int) -> bool:
        """Whether a process is one that this service started, and that would be ended with it."""
        return any(process.pid == pid for process in self._parts())

    def end_leftovers(self) -> None:
        """End whatever an earlier process of this service left running."""
        for number, wait_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0)):
            leftovers = self._parts()
            for process in leftovers:
                try:
                    process.send_signal(number)
                except psutil.Error:
                    continue
            if leftovers:
                psutil.wait_procs(leftovers, timeout=wait_s)

    def _parts(self) -> list[psutil.Process]:
        own_pid = os.getpid()
        parts = []
        for process in psutil.process_iter():
            try:
                if process.pid == own_pid or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.environ().get(MARKER) == self._marker or (
                    self._is_part is not None and self._is_part(process)
                ):
                    parts.append(process)
            except (psutil.Error, OSError):
                continue
        return parts

    def _last_line(self) -> str:
        try:
            with self._log_file.open("rb") as log:
                log.seek(max(0, self._log_file.stat().st_size - 4096))
                lines = log.read().decode("utf-8", "replace").split("\n")
        except OSError:
            return ""
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
