"""The embedded Prefect server and the process that serves the deployments."""

import json
import time
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from infra.processes import MARKER
from infra.state import StackState
from infra.supervisor import LocalStack, ServiceState

pytestmark = [pytest.mark.prefect, pytest.mark.slow]


def ignore(line: str) -> None:
    pass


def call(state: StackState, path: str, body: object) -> Any:
    address = urlsplit(state.prefect_api_url)
    connection = HTTPConnection("127.0.0.1", address.port or 0, timeout=10)
    try:
        connection.request("POST", f"/api{path}", json.dumps(body), {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def wait_for(find: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    deadline_s = time.monotonic() + 60
    while not (found := find()):
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    return found


def sleepers(stack: LocalStack) -> list[psutil.Process]:
    """What the sample's flow run started in a session of its own."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get(MARKER) == f"{stack.home.resolve()}:serve"
                and "time.sleep(600)" in process.cmdline()[-1]
            ):
                found.append(process)
        except (psutil.Error, IndexError):
            continue
    return found


def test_a_stack_lives_through_kills_and_ends_with_all_it_started(
    prefect_stack: LocalStack, kill_service: Callable[[LocalStack, str], None]
) -> None:
    """One story, since a Prefect server takes long to start."""
    state = prefect_stack.up(ignore)
    (deployment,) = call(state, "/deployments/filter", {})
    assert deployment["name"] == "sample"

    call(state, f"/deployments/{deployment['id']}/create_flow_run", {"state": {"type": "SCHEDULED"}})
    wait_for(lambda: sleepers(prefect_stack))

    # The serving process is killed: what its flow run left behind ends, and the deployment is served again.
    kill_service(prefect_stack, "serve")
    assert prefect_stack.up(ignore) == state
    assert sleepers(prefect_stack) == []
    (served_again,) = call(state, "/deployments/filter", {})
    assert served_again["id"] == deployment["id"]
    assert served_again["paused"] is False

    # The server is killed: it comes back with its deployments.
    kill_service(prefect_stack, "prefect")
    assert prefect_stack.up(ignore) == state
    assert [found["id"] for found in call(state, "/deployments/filter", {})] == [deployment["id"]]
    assert [status.state for status in prefect_stack.status()[2:]] == [ServiceState.RUNNING] * 2

    prefect_stack.down(ignore)
    assert [status.state for status in prefect_stack.status()[2:]] == [ServiceState.STOPPED] * 2
