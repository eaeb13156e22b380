import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.state import ExternalServices
from infra.supervisor import LocalStack

ELSEWHERE = "http://127.0.0.1:9"


def ignore(line: str) -> None:
    pass


@pytest.fixture
def kill_service() -> Callable[[LocalStack, str], None]:
    """Kills the process in charge of a service with -9 and returns when it is dead."""

    def kill(stack: LocalStack, name: str) -> None:
        (pid,) = (status.pid for status in stack.status() if status.name == name)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 10
        while any(status.pid == pid for status in stack.status()):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    return kill


@pytest.fixture
def postgres_stack(tmp_path: Path) -> Iterator[LocalStack]:
    """A stack whose only embedded service is Postgres."""
    external = ExternalServices(s3_endpoint_url=ELSEWHERE, prefect_api_url=f"{ELSEWHERE}/api")
    stack = LocalStack(tmp_path / "home", external=external, durable=False)
    yield stack
    stack.erase(ignore)


@pytest.fixture
def s3_stack(tmp_path: Path) -> Iterator[LocalStack]:
    """A stack whose only embedded service is the S3 server."""
    external = ExternalServices(
        database_url="postgresql://127.0.0.1:9/none", prefect_api_url=f"{ELSEWHERE}/api"
    )
    stack = LocalStack(tmp_path / "home", external=external)
    yield stack
    stack.erase(ignore)


@pytest.fixture
def prefect_stack(tmp_path: Path) -> Iterator[LocalStack]:
    """A stack with an embedded Prefect server and the sample deployment."""
    external = ExternalServices(database_url="postgresql://127.0.0.1:9/none", s3_endpoint_url=ELSEWHERE)
    sample = Path(__file__).parent / "serve_sample.py"
    stack = LocalStack(tmp_path / "home", external=external, serve_command=(sys.executable, str(sample)))
    yield stack
    stack.erase(ignore)
