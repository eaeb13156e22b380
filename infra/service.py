"""What the supervisor needs to know about a service."""

from typing import Protocol

from infra.processes import ServiceProcess


class Service(Protocol):
    """One embedded service. Objects hold no state of their own: everything lies in the state folder."""

    @property
    def name(self) -> str:
        """`postgres`, `s3`, `prefect` or `serve`."""
        ...

    @property
    def url(self) -> str | None:
        """Where it listens, without credentials; None if it does not listen."""
        ...

    @property
    def process(self) -> ServiceProcess:
        """The process in charge."""
        ...

    @property
    def start_timeout_s(self) -> float:
        """How long it may take to come up."""
        ...

    def launch(self) -> None:
        """Start the process; returns before the service answers.

        Raises:
            ServiceError: it cannot be started.
        """

    def is_ready(self) -> bool:
        """Whether it answers now, in milliseconds."""
        ...

    def prepare(self) -> None:
        """What has to be done once the service answers, before it is of use; harmless when done before."""

    def stop(self) -> None:
        """End it, cleanly if it lets us."""
