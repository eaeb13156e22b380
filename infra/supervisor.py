"""The stack of one machine: brings up what is missing, stops what is ours, says what runs."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from blend_core.errors import ServiceError
from infra.folder import StateFolder
from infra.postgres import PostgresService, postgres_root
from infra.prefect_server import PrefectService, ServeService
from infra.s3 import S3Service
from infra.service import Service
from infra.state import ExternalServices, StackConfig, StackState, stack_state
from infra.unprivileged import postgres_account

SERVE_COMMAND = (sys.executable, "-m", "flows.deployments")


class ServiceState(StrEnum):
    """What `status` found."""

    RUNNING = "running"
    UNHEALTHY = "unhealthy"  # its process lives and does not answer
    STOPPED = "stopped"
    EXTERNAL = "external"


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """One service as it is now.

    Attributes:
        name: `postgres`, `s3`, `prefect` or `serve`.
        state: see `ServiceState`.
        pid: of the process in charge; None unless it runs.
        url: where it listens, without credentials; None for `serve` and for external services.
        since: when its process started (UTC); None unless it runs.
    """

    name: str
    state: ServiceState
    pid: int | None = None
    url: str | None = None
    since: datetime | None = None


class LocalStack:
    """The embedded services of one state folder.

    Services are processes of their own that outlive the command which started them. Each is found again by
    its recorded pid, checked against the process' start time and arguments.
    """

    __slots__ = ("_durable", "_external", "_folder", "_serve_command", "_settings_file")

    def __init__(
        self,
        home: Path,
        *,
        external: ExternalServices | None = None,
        serve_command: Sequence[str] = SERVE_COMMAND,
        settings_file: Path | None = None,
        durable: bool = True,
    ) -> None:
        """Changes nothing.

        Args:
            home: the state folder; need not exist.
            external: services of the user's, used in place of embedded ones.
            serve_command: what serves the deployments.
            settings_file: read by what serves the deployments; need not exist.
            durable: False gives up Postgres' safety against a loss of power, for throw-away data.
        """
        self._folder = StateFolder(home)
        self._external = external or ExternalServices()
        self._serve_command = serve_command
        self._settings_file = settings_file
        self._durable = durable

    @property
    def home(self) -> Path:
        """The state folder."""
        return self._folder.home

    def up(self, progress: Callable[[str], None], serve: bool = True) -> StackState:
        """Start what is missing, in any state the last use left behind; harmless when everything runs.

        Args:
            progress: told one plain line per thing that happens.
            serve: also serve the deployments, by `python -m flows.deployments` with the services and the
                state folder in its environment.

        Raises:
            ServiceError: a service did not come up, and names its log file; or the disk is full.
        """
        with self._folder.lack_of_room_told():
            return self._up(progress, serve=serve)

    def _up(self, progress: Callable[[str], None], *, serve: bool) -> StackState:
        self._folder.create()
        with self._folder.lock(lambda: progress("waiting for another command to finish with the stack")):
            config = self._folder.load_or_create(
                lambda: postgres_root(self.home, self._folder.digest, postgres_account())
            )
            for service in self._embedded(config):
                if service.process.pid is None:
                    service.process.end_leftovers()  # they may hold the port
                    config = self._folder.with_free_port(config, f"{service.name}_port")
            self._start(self._embedded(config), progress)
            state = self._state(config)
            if serve:
                server = self._server(config)
                if server.process.pid is not None and not server.is_current:
                    progress("serve: settings changed, starting anew")
                    server.stop()
                self._start([server], progress)
            return state

    def down(self, progress: Callable[[str], None]) -> None:
        """Stop every service of this folder and everything they started; harmless when nothing runs."""
        config = self._folder.load()
        if config is None:
            return
        with self._folder.lock(lambda: progress("waiting for another command to finish with the stack")):
            for service in reversed(self._all(config)):
                was_running = service.process.pid is not None
                service.stop()
                if was_running:
                    progress(f"{service.name}: stopped")

    def ended_by_up(self, pids: Iterable[int]) -> list[int]:
        """Which of these processes `up` would end: those that the serving process started, where it is to be
        started anew since settings changed. Changes nothing.
        """
        config = self._folder.load()
        if config is None:
            return []
        server = self._server(config)
        if server.process.pid is None or server.is_current:
            return []
        return [pid for pid in pids if server.process.has_started(pid)]

    def status(self) -> list[ServiceStatus]:
        """What runs now: one entry per service, always in the same order. Changes nothing."""
        config = self._folder.load()
        found: dict[str, ServiceStatus] = {}
        if config is not None:
            found = {service.name: _status_of(service) for service in self._all(config)}
        external = self._external_names()
        return [
            ServiceStatus(name, ServiceState.EXTERNAL)
            if name in external
            else found.get(name, ServiceStatus(name, ServiceState.STOPPED))
            for name in ("postgres", "s3", "prefect", "serve")
        ]

    def state(self) -> StackState | None:
        """Where the services are, running or not; None before the first `up`."""
        return stack_state(self._folder.load(), self._external)

    def erase(self, progress: Callable[[str], None]) -> None:
        """Stop everything, then remove the folder with all data."""
        self.down(progress)
        self._folder.erase()

    def _external_names(self) -> set[str]:
        urls = {
            "postgres": self._external.database_url,
            "s3": self._external.s3_endpoint_url,
            "prefect": self._external.prefect_api_url,
        }
        return {name for name, url in urls.items() if url is not None}

    def _state(self, config: StackConfig) -> StackState:
        state = stack_state(config, self._external)
        assert state is not None, "the configuration has a place for every service"
        return state

    def _all(self, config: StackConfig) -> list[Service]:
        """Every service that can be ours, in the order of starting."""
        return [
            PrefectService(self.home, config),
            S3Service(self.home, config),
            PostgresService(self.home, config, postgres_account(), durable=self._durable),
            self._server(config),
        ]

    def _embedded(self, config: StackConfig) -> list[Service]:
        """The services with a port that are not the user's, the slowest first: they start side by side."""
        external = self._external_names()
        return [service for service in self._all(config)[:3] if service.name not in external]

    def _server(self, config: StackConfig) -> ServeService:
        return ServeService(
            self.home,
            self._state(config),
            command=self._serve_command,
            settings_file=self._settings_file,
            is_prefect_embedded=self._external.prefect_api_url is None,
        )

    def _start(self, services: Sequence[Service], progress: Callable[[str], None]) -> None:
        started_at_s = time.monotonic()
        pending: list[Service] = []
        for service in services:
            if service.process.pid is None:
                progress(f"{service.name}: starting")
                service.launch()
                pending.append(service)
            elif not service.is_ready():
                progress(f"{service.name}: waiting for it to answer")
                pending.append(service)
        # The quick ones first, so that each is reported when it is ready.
        for service in reversed(pending):
            self._wait(service, progress)
            progress(f"{service.name}: ready after {time.monotonic() - started_at_s:.1f} s")
        for service in services:
            service.prepare()

    def _wait(self, service: Service, progress: Callable[[str], None]) -> None:
        # A process found alive may hang or die in this moment, a new one may meet what a killed one left:
        # one more try each.
        try:
            service.process.wait_until(service.is_ready, timeout_s=service.start_timeout_s)
        except ServiceError as error:
            progress(f"{service.name}: starting anew, since {error}")
            service.stop()
            service.launch()
            service.process.wait_until(service.is_ready, timeout_s=service.start_timeout_s)


def _status_of(service: Service) -> ServiceStatus:
    process = service.process
    pid, since = process.pid, process.since
    if pid is None:
        return ServiceStatus(service.name, ServiceState.STOPPED, url=service.url)
    state = ServiceState.RUNNING if service.is_ready() else ServiceState.UNHEALTHY
    return ServiceStatus(service.name, state, pid, service.url, since)
