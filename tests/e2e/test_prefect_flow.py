"""A job as a Prefect flow: in this process, and as a run of the served deployment."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from logging import WARNING
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import psycopg
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
    LogFilterLevel,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Cancelling

from blend_core.errors import ConfigurationError
from flows.deployments import resubmit_job, submit_job
from flows.job_parts import SqlSource, WriteBack
from flows.job_spec import BatchJobSpec
from flows.prefect_queue import queued_jobs
from flows.wiring import Wiring
from storage.job_status import JobStatus
from storage.jobs import get_job, list_jobs
from storage.results import counts, iter_results

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.prefect, pytest.mark.slow]

BAD_LINES = (b"{", b"[1, 2]")


@pytest.fixture(scope="module")
def environment(
    environment: dict[str, str], prefect_api_url: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The variables of a process that wires itself, Prefect's among them."""
    return {
        **environment,
        "PREFECT_API_URL": prefect_api_url,
        "PREFECT_HOME": str(tmp_path_factory.mktemp("prefect-home")),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


@pytest.fixture(scope="module")
def client(environment: dict[str, str]) -> Iterator[SyncPrefectClient]:
    """A client of the real server."""
    url = environment["PREFECT_API_URL"]
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as prefect:
        yield prefect


def wait_for(what: Callable[[], Any], timeout_s: float) -> Any:
    """Polls until `what` returns something true."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        found = what()
        if found:
            return found
        time.sleep(0.25)
    raise AssertionError(f"nothing came within {timeout_s:.0f} s")


def artifact_keys(client: SyncPrefectClient, flow_run_id: UUID) -> set[str | None]:
    filter_ = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
    return {artifact.key for artifact in client.read_artifacts(artifact_filter=filter_)}


def task_names(client: SyncPrefectClient, flow_run_id: UUID) -> list[str]:
    runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))
    return sorted(run.name.rsplit("-", 1)[0] for run in runs)


FLOW_SCRIPT = """
import sys
from flows.job_spec import BatchJobSpec
from flows.run_batch import run_batch

state = run_batch(BatchJobSpec.model_validate_json(sys.argv[1]), return_state=True)
print(state.state_details.flow_run_id, state.type.value, state.message, sep="|")
"""


def run_flow(environment: dict[str, str], spec: BatchJobSpec) -> tuple[UUID, str, str]:
    """Calls the flow in a process of its own; returns the flow run, its state and the state's message."""
    done = subprocess.run(
        [sys.executable, "-c", FLOW_SCRIPT, spec.model_dump_json()],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    flow_run_id, state, message = done.stdout.strip().splitlines()[-1].split("|", 2)
    return UUID(flow_run_id), state, message


def test_the_flow_runs_both_sources_with_a_task_for_each_stage_and_rank(
    client: SyncPrefectClient, environment: dict[str, str], make_job: Any
) -> None:
    spec = make_job(
        name="two sources {logical_date:%Y}",
        num_chats=20,
        num_rows=10,
        bad_lines=BAD_LINES,
        options={"ranks": 2},
    )

    flow_run_id, state, message = run_flow(environment, spec)

    assert state == "COMPLETED", message
    assert "30 succeeded + 2 errored + 0 expired + 0 cancelled = 32" in message
    assert client.read_flow_run(flow_run_id).name == f"two sources {datetime.now(tz=UTC):%Y}"
    stages = ["export", "infer", "infer, rank 0", "infer, rank 1", "ingest", "plan", "report"]
    wait_for(lambda: task_names(client, flow_run_id) == stages, timeout_s=120)
    assert artifact_keys(client, flow_run_id) == {"progress", "summary", "density"}


def test_a_flow_run_whose_results_are_not_in_the_users_table_says_so(
    client: SyncPrefectClient, environment: dict[str, str], wiring: Wiring, make_job: Any
) -> None:
    table = {"connection": "shop", "table": "reply", "key_column": "id", "columns": {"text": "answer"}}
    spec = make_job(num_rows=1, max_tokens=2).model_copy(
        update={"write_back": WriteBack.model_validate(table)}
    )
    with psycopg.connect(wiring.endpoints.database_url) as connection:
        connection.execute("CREATE TABLE reply (id text PRIMARY KEY, answer text CHECK (false))")

    flow_run_id, state, message = run_flow(
        environment | {"BLEND_TARGETS__SHOP": wiring.endpoints.database_url}, spec
    )

    again = f"`blend write-back {list_jobs(wiring.database, limit=1)[0].job_id}` does it again"
    assert (state, again in message) == ("COMPLETED", True), message
    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
    (summary,) = [found for found in client.read_artifacts(artifact_filter=of_run) if found.key == "summary"]
    assert again in str(summary.data)
    logs = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run_id]), level=LogFilterLevel(ge_=WARNING))
    wait_for(lambda: any(again in log.message for log in client.read_logs(logs)), timeout_s=60)


def test_a_job_that_cannot_run_fails_the_flow_run_with_its_sentence(
    client: SyncPrefectClient, environment: dict[str, str], make_job: Any
) -> None:
    _, state, message = run_flow(environment, make_job(num_chats=2, model="no-such-model"))

    assert state == "FAILED"
    assert "blend model add" in message


@pytest.fixture(scope="module")
def served(
    client: SyncPrefectClient, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The deployments, served by a process of their own; gives its log."""
    log = tmp_path_factory.mktemp("served") / "serve.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.deployments"],
            env={**os.environ, **environment, "PREFECT_RUNNER_POLL_FREQUENCY": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(lambda: process.poll() is not None or _is_served(client), timeout_s=180)
        assert process.poll() is None, log.read_text()
        yield log
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def _is_served(client: SyncPrefectClient) -> bool:
    try:
        return not client.read_deployment_by_name("run-batch/ad-hoc").paused
    except ObjectNotFound:
        return False


def with_prefect(wiring: Wiring, environment: dict[str, str]) -> Wiring:
    """The same parts for somebody who submits to Prefect."""
    endpoints = replace(wiring.endpoints, prefect_api_url=environment["PREFECT_API_URL"])
    return Wiring(wiring.settings, endpoints, wiring.database, wiring.objects)


def _ended(client: SyncPrefectClient, flow_run_id: str) -> FlowRun | None:
    flow_run = client.read_flow_run(UUID(flow_run_id))
    return flow_run if flow_run.state is not None and flow_run.state.is_final() else None


def test_a_run_of_the_served_deployment_runs_the_job(
    client: SyncPrefectClient, served: Path, environment: dict[str, str], wiring: Wiring, make_job: Any
) -> None:
    there, spec = with_prefect(wiring, environment), make_job(num_chats=10, bad_lines=BAD_LINES)
    submitted = submit_job(there, spec, "night 1")

    assert submit_job(there, spec, "night 1") == submitted
    assert get_job(wiring.database, submitted.job_id).status is JobStatus.VALIDATING
    flow_run = wait_for(lambda: _ended(client, submitted.flow_run_id), timeout_s=400)

    assert flow_run.state.type is StateType.COMPLETED, flow_run.state.message
    job = get_job(wiring.database, submitted.job_id)
    assert (job.status, job.num_succeeded, job.num_errored) == (JobStatus.COMPLETED, 10, 2)


def test_a_job_is_queued_until_its_flow_run_ends(
    client: SyncPrefectClient, served: Path, environment: dict[str, str], wiring: Wiring, make_job: Any
) -> None:
    def queued() -> frozenset[str]:
        found = queued_jobs(environment["PREFECT_API_URL"])
        assert found is not None
        return found

    there = with_prefect(wiring, environment)
    first, waiting = (submit_job(there, make_job(num_chats=1)) for _ in range(2))
    assert {first.job_id, waiting.job_id} <= queued()

    client.set_flow_run_state(UUID(waiting.flow_run_id), Cancelled(), force=True)
    assert waiting.job_id not in queued()
    wait_for(lambda: _ended(client, first.flow_run_id), timeout_s=400)
    assert first.job_id not in queued()


def test_a_connection_unknown_to_the_serving_process_is_refused_before_a_job_is_made(
    served: Path, environment: dict[str, str], wiring: Wiring, make_job: Any
) -> None:
    query = {"query": "SELECT 1 AS id", "prompt": "{{ id }}", "connection": "shop"}
    before = [job.job_id for job in list_jobs(wiring.database, limit=1)]

    with pytest.raises(ConfigurationError, match=r"BLEND_SOURCES__SHOP in the environment of `blend up`"):
        submit_job(
            with_prefect(wiring, environment),
            make_job(num_chats=1).model_copy(update={"sql": [SqlSource.model_validate(query)]}),
        )

    assert [job.job_id for job in list_jobs(wiring.database, limit=1)] == before


def test_cancelling_the_flow_run_cancels_the_job_and_keeps_its_results(
    client: SyncPrefectClient, served: Path, environment: dict[str, str], wiring: Wiring, make_job: Any
) -> None:
    submitted = submit_job(with_prefect(wiring, environment), make_job(num_chats=2_000, max_tokens=200))
    job_id, flow_run_id = submitted.job_id, submitted.flow_run_id
    wait_for(lambda: counts(wiring.database, job_id).succeeded >= 10, timeout_s=400)

    client.set_flow_run_state(UUID(flow_run_id), Cancelling())
    flow_run = wait_for(lambda: _ended(client, flow_run_id), timeout_s=400)

    assert flow_run.state.type is StateType.CANCELLED
    job = wait_for(lambda: (job := get_job(wiring.database, job_id)).status.is_end and job, timeout_s=120)
    assert job.status is JobStatus.CANCELLED
    assert job.num_succeeded >= 10
    assert job.num_succeeded + job.num_cancelled == job.num_total == 2_000
    assert job.output_uri


def test_a_job_whose_flow_process_was_killed_is_continued_through_prefect(
    client: SyncPrefectClient, served: Path, environment: dict[str, str], wiring: Wiring, make_job: Any
) -> None:
    parts = with_prefect(wiring, environment)
    job_id = submit_job(parts, make_job(num_chats=400, max_tokens=40)).job_id
    wait_for(lambda: counts(wiring.database, job_id).succeeded >= 10, timeout_s=400)

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended since, or has not been reaped
            if "prefect.engine" in process.cmdline():
                process.kill()
    kept = {row.seq: row for row in iter_results(wiring.database, job_id) if row.status is not None}
    again = resubmit_job(parts, job_id)
    flow_run = wait_for(lambda: _ended(client, again.flow_run_id), timeout_s=400)

    assert flow_run.state.type is StateType.COMPLETED, flow_run.state.message
    assert len(kept) >= 10
    rows = {row.seq: row for row in iter_results(wiring.database, job_id)}
    assert len(rows) == 400
    assert {seq: rows[seq] for seq in kept} == kept
