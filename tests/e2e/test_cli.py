"""The command line against the real stack, each command in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest

from flows.lease_holder import holder_details
from flows.progress import SilentProgress
from flows.running import cancel_job, create_job
from flows.wiring import Wiring
from storage.jobs import get_job
from storage.lost_runs import mark_lost
from storage.ownership import Run
from storage.runs import WAITS_FOR, RunStatus, finish_run, latest_run, set_run_details, start_run
from tests.e2e.command_line import PREFECT_DOWN, Blend, blend_in
from tests.older_job import make_older

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]


@pytest.fixture
def blend(environment: dict[str, str], tmp_path: Path) -> Blend:
    """Runs `blend ARGUMENTS` with the stack in its environment and Prefect down."""
    return blend_in(tmp_path, os.environ | environment | PREFECT_DOWN)


@pytest.fixture
def job_file(make_job: Any, tmp_path: Path) -> Path:
    """A job of three chats, two bad lines and two rows."""
    spec = make_job(num_chats=3, bad_lines=(b"{nope", b"[]"), num_rows=2)
    path = tmp_path / "job.yaml"
    path.write_text(spec.model_dump_json())
    return path


def test_a_job_runs_from_a_file_and_is_read_back_with_prefect_down(
    blend: Blend, job_file: Path, tmp_path: Path
) -> None:
    ran = json.loads(blend("run", str(job_file), "--json").stdout)
    assert (ran["status"], ran["total"], ran["succeeded"], ran["errored"]) == ("completed", 7, 5, 2)
    job_id = ran["job_id"]

    status = json.loads(blend("status", job_id, "--json").stdout)
    assert status["pending"] == 0
    assert status["succeeded"] == 5

    lines = blend("results", job_id).stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 7
    assert {row["status"] for row in rows} == {"succeeded", "errored"}
    assert all(row["output_text"] is not None for row in rows if row["status"] == "succeeded")

    errors = json.loads(blend("results", job_id, "--errors", "--json").stdout)["results"]
    assert sorted(row["error_code"] for row in errors) == ["invalid_json", "not_an_object"]

    csv_lines = blend("results", job_id, "--format", "csv", "--limit", "2").stdout.splitlines()
    assert csv_lines[0].startswith("seq,custom_id")
    assert "invalid_json" in blend("results", job_id, "--format", "table").stdout
    assert blend("results", job_id, "--format", "parquet", "--output", "r.parquet").stdout == ""
    table = pq.read_table(tmp_path / "r.parquet")
    assert table.select(["seq", "custom_id", "status"]).to_pylist() == [
        {name: row[name] for name in ("seq", "custom_id", "status")} for row in rows
    ]
    blend("results", job_id, "--output", "r.jsonl")
    assert (tmp_path / "r.jsonl").read_text().splitlines() == lines
    (table_uri,) = ran["table_uris"]
    assert table_uri == f"{ran['output_uris'][0].rsplit('/', 1)[0]}/results.parquet"

    report = json.loads(blend("report", job_id, "--json").stdout)
    assert report["total"] == 7
    assert report["what_if"]["device"] == "a100-80g"
    assert report["num_batches"] == len(report["batches"]) > 0
    assert "5 succeeded + 2 errored" in blend("report", job_id).stdout

    assert job_id in blend("status").stdout
    everything = json.loads(blend("status", "--json").stdout)
    assert {entry["name"] for entry in everything["services"]} == {"postgres", "s3", "prefect", "serve"}

    again = json.loads(blend("run", "--job-id", job_id, "--json").stdout)
    assert again["succeeded"] == 5, "a job that has ended is left as it is"
    assert (ran["had_ended_before"], again["had_ended_before"]) == (False, True)

    cancelled = json.loads(blend("cancel", job_id, "--json").stdout)
    assert cancelled["status"] == "completed", "an end state is never overwritten"


def test_the_read_only_address_reads_and_nothing_else(blend: Blend) -> None:
    blend("db", "upgrade")
    url = json.loads(blend("db", "url", "--read-only", "--json").stdout)["database_url"]
    with psycopg.connect(url) as connection:
        connection.execute("SELECT count(*) FROM job_progress")
        with pytest.raises(psycopg.Error):
            connection.execute("DELETE FROM batch_job")


def test_an_unknown_job_is_one_sentence(blend: Blend) -> None:
    blend("db", "upgrade")
    for command in ("results", "report", "cancel", "status"):
        done = blend(command, "job_nowhere", status=1)
        assert done.stdout == ""
        assert "job_nowhere" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_failed_run_names_its_job_and_how_it_stands(blend: Blend, job_file: Path) -> None:
    spec = json.loads(job_file.read_text())
    job_file.write_text(json.dumps(spec | {"s3": [f"{spec['s3'][0]}.gone"]}))
    done = blend("run", str(job_file), "--json", status=1)
    error = json.loads(done.stdout)["error"]
    assert (error["type"], error["status"], error["retryable"]) == ("SourceError", "failed", False)
    assert error["job_id"] in done.stderr
    assert error["message"] in done.stderr
    again = json.loads(blend("run", "--job-id", error["job_id"], "--json", status=1).stdout)
    assert (again["status"], again["error_message"]) == ("failed", error["message"])
    assert error["message"] in blend("run", "--job-id", error["job_id"], status=1).stdout


def test_a_run_of_a_job_that_was_cancelled_is_no_success(blend: Blend, wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=2))
    cancel_job(wiring, job_id, SilentProgress())
    done = blend("run", "--job-id", job_id, "--json", status=1)
    assert json.loads(done.stdout)["status"] == "cancelled"
    assert f"Job {job_id} had ended before, cancelled at 2" in done.stderr
    assert f"Job {job_id} had ended before, cancelled: 0" in blend("run", "--job-id", job_id, status=1).stdout
    refused = blend("submit", "--job-id", job_id, status=2)
    assert f"Job {job_id} had ended before, cancelled at 2" in refused.stderr
    assert "submit a new job" in refused.stderr


def test_a_job_that_nothing_runs_is_told_in_the_list(blend: Blend, wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=2))
    make_older(wiring.database, job_id)
    # It may be queued in the Prefect that does not answer.
    assert job_id not in json.loads(blend("status", "--json").stdout)["stopped_jobs"]
    run = start_run(wiring.database, job_id, engine="torch", policy="fcfs", details={}, lease_s=30)
    mark_lost(wiring.database, run.run_id)
    assert job_id in json.loads(blend("status", "--json").stdout)["stopped_jobs"]
    assert json.loads(blend("status", job_id, "--json").stdout)["is_stopped"]
    assert f"Nothing runs job {job_id}" in blend("status").stdout
    cancel_job(wiring, job_id, SilentProgress())


def test_why_a_job_stopped_and_what_continues_it_are_told_once(
    blend: Blend, wiring: Wiring, make_job: Any
) -> None:
    def status_after(end: RunStatus, reason: str) -> str:
        run = start_run(wiring.database, job_id, engine="torch", policy="fcfs", details={}, lease_s=30)
        finish_run(wiring.database, run, end, error_message=reason)
        told = json.loads(blend("status", job_id, "--json").stdout)
        assert (told["latest_run_status"], told["latest_run_error"]) == (end, reason)
        text: str = blend("status", job_id).stdout
        return text

    def list_of_jobs() -> str:
        text: str = blend("status").stdout
        return text

    job_id = create_job(wiring, make_job(num_chats=1))
    text = status_after(RunStatus.FAILED, "The disk is full.")
    assert "Its latest run failed: The disk is full.\nNothing runs it; once that is mended, continue" in text
    assert f"its latest run failed; see why, and what to do, with: blend status {job_id}\n" in list_of_jobs()
    text = status_after(RunStatus.CANCELLED, "The process was told to end; run it again to continue it.")
    assert "Nothing runs it: its latest run was told to end; continue it with: blend run --job-id" in text
    assert text.count("continue it") == 1
    assert "failed" not in text
    cancel_job(wiring, job_id, SilentProgress())


def test_a_job_that_nothing_is_going_to_begin_is_told(
    environment: dict[str, str], tmp_path: Path, wiring: Wiring, make_job: Any
) -> None:
    blend = blend_in(tmp_path, os.environ | environment)
    job_id = create_job(wiring, make_job(num_chats=2))
    assert job_id not in json.loads(blend("status", "--json").stdout)["stopped_jobs"], "it was just made"
    make_older(wiring.database, job_id)
    assert job_id in json.loads(blend("status", "--json").stdout)["stopped_jobs"]
    assert json.loads(blend("status", job_id, "--json").stdout)["is_stopped"]
    assert f"Nothing runs it; continue it with: blend run --job-id {job_id}" in blend("status", job_id).stdout
    cancel_job(wiring, job_id, SilentProgress())


def test_a_job_whose_process_was_killed_does_not_look_healthy(
    blend: Blend, wiring: Wiring, make_job: Any
) -> None:
    def held_by(details: dict[str, str], job_id: str) -> tuple[dict[str, Any], str]:
        start_run(wiring.database, job_id, engine="torch", policy="dfs", details=details, lease_s=600)
        told: dict[str, Any] = json.loads(blend("status", job_id, "--json").stdout)["held_by"]
        return told, blend("status", job_id).stdout

    spec = make_job(num_chats=1)
    waiting = create_job(wiring, spec)
    told = json.loads(blend("status", waiting, "--json").stdout)
    assert (told["held_by"], told["engine"], told["is_stopped"]) == (None, None, False)
    assert (told["latest_run_status"], told["latest_run_error"]) == (None, None)
    assert "No run has begun it yet; of submitted jobs one runs at a time" in blend("status", waiting).stdout

    live, text = held_by(holder_details(), waiting)
    assert (live["is_gone"], live["process"].split()[:2]) == (False, ["process", str(os.getpid())])
    assert f"Run by process {os.getpid()} on " in text
    assert ", engine torch, policy dfs, day " in text
    assert json.loads(blend("status", waiting, "--json").stdout)["engine"] == "torch"
    assert "last sign of life" in text
    assert live["waits_for"] is None
    run = latest_run(wiring.database, waiting)
    assert run is not None
    owner = Run(run.run_id, waiting, get_job(wiring.database, waiting).fencing_number)
    set_run_details(wiring.database, owner, {WAITS_FOR: "Waiting for here:cpu: another run runs on it."})
    assert "\nWaiting for here:cpu: another run runs on it.\n" in blend("status", waiting).stdout

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    job_id = create_job(wiring, spec)
    dead, text = held_by(holder_details() | {"holder_pid": str(ended.pid)}, job_id)
    assert dead["is_gone"]
    assert f"Nothing runs it: process {ended.pid} on " in text
    assert "is gone, last sign of life" in text
    assert f"; continue it with: blend run --job-id {job_id}\n" in text


def test_submitting_without_prefect_says_what_to_do(blend: Blend, job_file: Path) -> None:
    done = blend("submit", str(job_file), status=1)
    assert "blend up" in done.stderr


def test_a_job_of_an_unknown_model_is_shown_with_its_reason(
    blend: Blend, wiring: Wiring, make_job: Any
) -> None:
    job_id = create_job(wiring, make_job(num_chats=1, model="gone"))
    blend("run", "--job-id", job_id, status=2)
    for command in ("report", "status"):
        assert "blend model add gone" in blend(command, job_id).stdout
    assert "blend model add gone" in json.loads(blend("report", job_id, "--json").stdout)["failure"]


def test_an_uploaded_file_runs(blend: Blend, tiny_model: str, tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    line["body"] = {"prompt": "Name a colour.", "max_tokens": 2}  # type: ignore[assignment]
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    uri = blend("upload", "in.jsonl").stdout.strip()
    assert uri.endswith("/uploads/in.jsonl")
    folder = uri.removesuffix("uploads/in.jsonl") + "monday"
    [entry] = json.loads(blend("upload", "in.jsonl", "--to", folder, "--json").stdout)["objects"]
    assert entry["uri"] == f"{folder}/in.jsonl"

    ran = json.loads(blend("run", "--s3", uri, "--s3", f"{folder}/", "--model", tiny_model, "--json").stdout)
    assert (ran["total"], ran["succeeded"], ran["errored"]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("BLEND_ENGINE__DEVICE", "cuda:77"),
        ("BLEND_ENGINE__DEVICE", "abacus"),
        ("BLEND_ENGINE__DEVICE_PROFILE", "gone"),
    ],
)
def test_a_wrong_engine_setting_is_found_before_there_is_a_job(
    blend: Blend, job_file: Path, variable: str, value: str
) -> None:
    blend("db", "upgrade")
    before = json.loads(blend("status", "--json").stdout)["jobs"]
    done = blend("run", str(job_file), status=2, environment={variable: value})
    assert value in done.stderr
    assert json.loads(blend("status", "--json").stdout)["jobs"] == before


@pytest.mark.parametrize(
    ("query", "options", "reason"),
    [
        ("DELETE FROM ticket", (), "one SELECT"),
        ("SELECT 1 AS id", ("--connection", "shop"), "BLEND_SOURCES__SHOP"),
        ("SELECT 1 AS id", ("--model", "gone"), "blend model add gone"),
    ],
)
def test_a_job_that_cannot_start_leaves_no_row(
    blend: Blend, tmp_path: Path, tiny_model: str, query: str, options: tuple[str, ...], reason: str
) -> None:
    blend("db", "upgrade")
    before = json.loads(blend("status", "--json").stdout)["jobs"]
    (tmp_path / "q.sql").write_text(f"-- tickets\n{query}\n")
    asked = ("run", "--sql", "q.sql", "--prompt", "{{ id }}", "--model", tiny_model, *options)
    assert reason in blend(*asked, status=2).stderr
    assert json.loads(blend("status", "--json").stdout)["jobs"] == before


def test_a_file_in_s3_is_validated_where_it_lies(blend: Blend, job_file: Path) -> None:
    uri = json.loads(job_file.read_text())["s3"][0]
    found = json.loads(blend("validate", uri, "--json").stdout)
    assert (found["total"], found["invalid"]) == (5, 2)
