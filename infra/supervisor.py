"""The stack of one machine: brings up what is missing, stops what is ours, says what runs."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from infra.state import ExternalServices, StackState


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
        url: where it listens, without credentials; None for `serve`.
        since: when its process started (UTC); None unless it runs.
    """

    name: str
    state: ServiceState
    pid: int | None
    url: str | None
    since: datetime | None


class LocalStack:
    """The embedded services of one state folder.

    Services are processes of their own that outlive the command which started them. Each is found again by its
    recorded pid, checked against the process' start time and command line.
    """

    __slots__ = ("_external", "_folder")

    def __init__(self, home: Path, *, external: ExternalServices = ExternalServices()) -> None:
        raise NotImplementedError

    def up(self, progress: Callable[[str], None], serve: bool = True) -> StackState:
        """Start what is missing, in any state the last use left behind; harmless and fast when everything runs.

        Args:
            progress: told one plain line per thing that happens.
            serve: also serve the deployments (`python -m flows.deployments`, with BLEND_HOME and PREFECT_API_URL set).

        Raises:
            ServiceError: a service did not come up; names its log file.
        """
        raise NotImplementedError

    def down(self, progress: Callable[[str], None]) -> None:
        """Stop every service of this folder and everything they started; harmless when nothing runs."""
        raise NotImplementedError

    def status(self) -> list[ServiceStatus]:
        """What runs now: one entry per service, always in the same order. Changes nothing."""
        raise NotImplementedError

    def state(self) -> StackState | None:
        """Where the services are, running or not; None before the first `up`."""
        raise NotImplementedError

    def erase(self, progress: Callable[[str], None]) -> None:
        """Stop everything, then remove the folder with all data."""
        raise NotImplementedError
