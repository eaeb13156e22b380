"""What `blend submit` says of a job that was there already."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from flows.deployments import Submitted


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Ids of jobs by key; a job that is submitted is among them."""
    jobs: dict[str, str] = {}
    wiring = SimpleNamespace(
        database=jobs,
        settings=SimpleNamespace(prefect_api_url="http://127.0.0.1:9/api"),
        endpoints=SimpleNamespace(prefect_api_url="http://127.0.0.1:9/api"),
    )

    @contextmanager
    def connected() -> Iterator[Any]:
        yield wiring

    def submit(wiring: Any, spec: object, key: str | None, *, logical_date: object) -> Submitted:
        return Submitted(jobs.setdefault(key or "none", f"job_{len(jobs)}"), "flow_1")

    monkeypatch.setattr("flows.cli.services.connected", connected)
    monkeypatch.setattr("flows.deployments.submit_job", submit)
    monkeypatch.setattr("storage.jobs.job_of_key", lambda database, key: database.get(key))
    return jobs


@pytest.mark.usefixtures("made")
def test_the_same_key_again_is_told_as_a_job_that_was_there(blend: Callable[..., Any]) -> None:
    asked = ("submit", "--s3", "s3://blend/a.jsonl", "--idempotency-key", "night 1")
    first, second = (blend(*asked).stdout.splitlines()[0] for _ in range(2))
    assert first == "Submitted job job_0"
    assert second == "Job job_0 was there already, made with this idempotency key."
    told = json.loads(blend(*asked, "--json").stdout)
    assert (told["job_id"], told["is_new"]) == ("job_0", False)
    assert json.loads(blend(*asked[:-1], "night 2", "--json").stdout)["is_new"]
