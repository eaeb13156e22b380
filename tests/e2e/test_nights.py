"""Nights of a nightly job as Prefect starts them, and from the command line."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from blend_core.errors import RunInterruptedError
from flows.job_parts import CatchUp
from flows.job_spec import BatchJobSpec
from flows.nights import create_night, register
from flows.progress import SilentProgress
from flows.running import create_job, run_job, run_stages
from flows.stopping import StopReason, StopSignal
from flows.wiring import Wiring
from storage.jobs import Job, get_job, list_jobs
from storage.results import counts
from tests.e2e.watched_run import wait_for

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]

NIGHT_SCRIPT = """
import json, sys
from datetime import datetime
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect.states import Scheduled
from flows.job_spec import BatchJobSpec
from flows.run_batch import NightlySchedule, run_batch

job = BatchJobSpec.model_validate_json(sys.argv[1])
schedule = NightlySchedule(cron="30 2 * * *", timezone="Europe/Berlin")
found = []
for text in sys.argv[2:]:
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(
            run_batch,
            parameters={"job": job.model_dump(mode="json"), "schedule": schedule.model_dump()},
            state=Scheduled(scheduled_time=datetime.fromisoformat(text)),
        )
    state = run_flow(
        run_batch, flow_run, parameters={"job": job, "schedule": schedule}, return_type="state"
    )
    found.append([state.type.value, state.name, state.message])
print(json.dumps(found))
"""
RUN_MAIN = "from flows.cli import main; main()"


@pytest.fixture
def run_nights(
    environment: dict[str, str], prefect_api_url: str, tmp_path: Path
) -> Callable[..., list[list[str]]]:
    """Runs the flow as if Prefect had scheduled it at each of the times."""
    variables = {
        **os.environ,
        **environment,
        "PREFECT_API_URL": prefect_api_url,
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }

    def run(spec: BatchJobSpec, *times: datetime) -> list[list[str]]:
        done = subprocess.run(
            [sys.executable, "-c", NIGHT_SCRIPT, spec.model_dump_json(), *(at.isoformat() for at in times)],
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
            check=True,
        )
        states: list[list[str]] = json.loads(done.stdout.strip().splitlines()[-1])
        return states

    return run


@pytest.fixture
def nightly_spec(wiring: Wiring, make_job: Any, request: pytest.FixtureRequest) -> BatchJobSpec:
    """A job whose folder of each day has one request, named by the day."""
    name = request.node.originalname
    base: BatchJobSpec = make_job(num_rows=1, max_tokens=2)
    query = base.sql[0].query.replace("SELECT id", "SELECT {logical_date:%Y-%m-%d} AS id")
    return base.model_copy(update={"name": name, "sql": [base.sql[0].model_copy(update={"query": query})]})


def jobs_of(wiring: Wiring, name: str) -> list[Job]:
    return [job for job in list_jobs(wiring.database, limit=500) if job.name == name]


def days_asked(wiring: Wiring, job_id: str) -> list[str]:
    with psycopg.connect(wiring.endpoints.database_url) as connection:
        rows = connection.execute("SELECT custom_id FROM request WHERE job_id = %s", (job_id,)).fetchall()
    return [row[0] for row in rows]


def close_window(wiring: Wiring, job_id: str) -> None:
    with psycopg.connect(wiring.endpoints.database_url) as connection:
        connection.execute("UPDATE batch_job SET expires_at = now() WHERE job_id = %s", (job_id,))


@pytest.mark.prefect
def test_a_night_in_which_the_clocks_change_is_run_once(
    wiring: Wiring, run_nights: Callable[..., list[list[str]]], nightly_spec: BatchJobSpec
) -> None:
    # In spring 02:30 does not exist: Prefect starts at 03:30. In autumn it exists twice.
    spring, autumn = date(2026, 3, 29), date(2026, 10, 25)
    times = [
        datetime(day.year, day.month, day.day, hour, 30, tzinfo=UTC)
        for day in (spring, autumn)
        for hour in (0, 1)
    ]

    states = run_nights(nightly_spec.model_copy(update={"catch_up": CatchUp.ALL}), *times)

    assert [state[0] for state in states] == ["COMPLETED"] * 4, states
    second, first = jobs_of(wiring, nightly_spec.name)
    assert (first.logical_date, second.logical_date) == (spring, autumn)
    for job, told in ((first, states[:2]), (second, states[2:])):
        assert days_asked(wiring, job.job_id) == [str(job.logical_date)]
        assert all(job.job_id in state[2] for state in told)


@pytest.mark.prefect
def test_a_night_catches_up_and_one_that_comes_too_late_is_skipped(
    wiring: Wiring, run_nights: Callable[..., list[list[str]]], nightly_spec: BatchJobSpec
) -> None:
    spec = nightly_spec.model_copy(update={"catch_up": CatchUp.LATEST})
    register(wiring, spec, "30 2 * * *", "Europe/Berlin")
    with psycopg.connect(wiring.endpoints.database_url) as connection:
        connection.execute(
            "UPDATE nightly SET since = now() - interval '4 days' WHERE name = %s", (spec.name,)
        )
    now = datetime.now(tz=UTC)

    late, own = run_nights(spec, now - timedelta(days=3), now)

    assert late[:2] == ["COMPLETED", "Skipped"]
    assert own[0] == "COMPLETED", own
    jobs = jobs_of(wiring, spec.name)
    assert len(jobs) == 2
    assert all(job.status == "completed" and job.nightly == spec.name for job in jobs)
    # The newest job is the night's own, and the one before it made up for the night before.
    assert jobs[0].logical_date - jobs[1].logical_date == timedelta(days=1)


@pytest.mark.prefect
def test_a_night_is_run_though_the_one_that_it_catches_up_with_expires(
    wiring: Wiring, run_nights: Callable[..., list[list[str]]], nightly_spec: BatchJobSpec
) -> None:
    spec = nightly_spec.model_copy(update={"catch_up": CatchUp.ALL})
    now = datetime.now(tz=UTC)
    stuck_id, _ = create_night(wiring, spec, now.date() - timedelta(days=3))
    close_window(wiring, stuck_id)

    (state,) = run_nights(spec, now)

    assert get_job(wiring.database, stuck_id).status == "expired"
    assert state[0] == "COMPLETED", state
    own = jobs_of(wiring, spec.name)[0]
    assert own.job_id != stuck_id
    assert (own.status, own.num_succeeded) == ("completed", 1)


@pytest.fixture
def blend(environment: dict[str, str], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs `blend ARGUMENTS --json` with Prefect down, and reads what it printed."""
    variables = os.environ | environment | {"PREFECT_API_URL": "http://127.0.0.1:9/api"}

    def run(*arguments: str, status: int = 0, **more: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", RUN_MAIN, *arguments, "--json"],
            env=variables | more,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        (tmp_path / "stderr").write_text(done.stderr)
        assert done.returncode == status, done.stderr
        printed: dict[str, Any] = json.loads(done.stdout)
        return printed

    return run


def test_a_range_is_filled_in_and_again_does_nothing(
    wiring: Wiring, blend: Callable[..., dict[str, Any]], nightly_spec: BatchJobSpec, tmp_path: Path
) -> None:
    (tmp_path / "night.yaml").write_text(nightly_spec.model_dump_json())
    command = ("backfill", "night.yaml", "--from", "2026-02-28", "--to", "2026-03-01")

    nights = blend(*command)["nights"]

    assert [night["logical_date"] for night in nights] == ["2026-02-28", "2026-03-01"]
    for night in nights:
        assert (night["status"], night["succeeded"], night["is_new"]) == ("completed", 1, True)
        assert days_asked(wiring, night["job_id"]) == [night["logical_date"]]
    assert blend(*command)["nights"] == [{**night, "is_new": False} for night in nights]


def test_the_completion_window_of_a_night_begins_when_its_turn_comes(
    wiring: Wiring, blend: Callable[..., dict[str, Any]], nightly_spec: BatchJobSpec, tmp_path: Path
) -> None:
    (tmp_path / "night.yaml").write_text(nightly_spec.model_dump_json())
    stopped_id, _ = create_night(wiring, nightly_spec, date(2026, 2, 27))

    nights = blend("backfill", "night.yaml", "--from", "2026-02-27", "--to", "2026-03-01")["nights"]

    assert [night["status"] for night in nights] == ["completed"] * 3
    assert (nights[0]["job_id"], nights[0]["is_new"]) == (stopped_id, False)
    jobs = [get_job(wiring.database, night["job_id"]) for night in nights]
    for earlier, later in pairwise(jobs):
        assert earlier.finished_at is not None
        assert later.expires_at is not None
        assert later.expires_at - timedelta(hours=24) >= earlier.finished_at


def test_a_night_whose_results_are_not_in_the_users_table_is_told_until_they_are(
    wiring: Wiring, blend: Callable[..., dict[str, Any]], nightly_spec: BatchJobSpec, tmp_path: Path
) -> None:
    table = {"connection": "shop", "table": "reply", "key_column": "day", "columns": {"text": "answer"}}
    (tmp_path / "night.yaml").write_text(
        json.dumps(nightly_spec.model_dump(mode="json") | {"write_back": table})
    )
    command = ("backfill", "night.yaml", "--from", "2026-02-28", "--to", "2026-02-28")
    shop = {"BLEND_TARGETS__SHOP": wiring.endpoints.database_url}
    with psycopg.connect(wiring.endpoints.database_url) as connection:
        connection.execute(
            "CREATE TABLE reply (day date PRIMARY KEY, answer text CONSTRAINT no CHECK (false))"
        )

    (night,) = blend(*command, status=1, **shop)["nights"]

    assert (night["status"], night["succeeded"], night["is_new"]) == ("completed", 1, True)
    assert "refused" in night["error"]
    assert blend(*command, status=1, **shop)["nights"] == [{**night, "is_new": False}]
    with psycopg.connect(wiring.endpoints.database_url) as connection:
        connection.execute("ALTER TABLE reply DROP CONSTRAINT no")
    blend("write-back", night["job_id"], **shop)
    assert blend(*command, **shop)["nights"] == [{**night, "is_new": False, "error": None}]


def test_a_backfill_goes_on_behind_a_night_that_expires(
    wiring: Wiring, blend: Callable[..., dict[str, Any]], nightly_spec: BatchJobSpec, tmp_path: Path
) -> None:
    (tmp_path / "night.yaml").write_text(nightly_spec.model_dump_json())
    overdue_id, _ = create_night(wiring, nightly_spec, date(2026, 2, 28))
    close_window(wiring, overdue_id)

    told = blend("backfill", "night.yaml", "--from", "2026-02-28", "--to", "2026-03-01", status=1)

    first, second = told["nights"]
    assert (first["job_id"], first["status"]) == (overdue_id, "expired")
    assert (second["status"], second["succeeded"]) == ("completed", 1)
    assert "was stopped" not in (tmp_path / "stderr").read_text()


@pytest.fixture
def signalled_backfill(
    wiring: Wiring, environment: dict[str, str], make_job: Any, tmp_path: Path
) -> Callable[[str, signal.Signals], tuple[int, list[dict[str, Any]], bytes]]:
    """Sends a signal into the first night of `blend backfill --to DAY`; returns status, nights and stderr."""
    spec = make_job(num_chats=600, max_tokens=200).model_copy(update={"name": tmp_path.name})
    (tmp_path / "night.yaml").write_text(spec.model_dump_json())

    def has_begun() -> bool:
        # The first night is the oldest of the jobs.
        jobs = jobs_of(wiring, spec.name)
        return bool(jobs) and counts(wiring.database, jobs[-1].job_id).succeeded >= 10

    def run(last: str, number: signal.Signals) -> tuple[int, list[dict[str, Any]], bytes]:
        process = subprocess.Popen(
            [
                sys.executable, "-c", RUN_MAIN,
                "backfill", "night.yaml", "--from", "2026-02-28", "--to", last, "--json",
            ],
            env=os.environ | environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            wait_for(has_begun, timeout_s=300)
            process.send_signal(number)
            told, notes = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        return process.returncode, json.loads(told)["nights"], notes

    return run


def test_a_backfill_that_is_told_to_end_begins_no_other_night(
    wiring: Wiring,
    signalled_backfill: Callable[[str, signal.Signals], tuple[int, list[dict[str, Any]], bytes]],
    tmp_path: Path,
) -> None:
    status, (first, second), notes = signalled_backfill("2026-03-01", signal.SIGTERM)

    assert (first["status"], second["status"]) == ("in_progress", "not_begun")
    assert first["job_id"] in first["error"]
    assert (second["job_id"], second["error"]) == (None, None)
    assert [job.job_id for job in jobs_of(wiring, tmp_path.name)] == [first["job_id"]]
    assert b"The backfill was stopped" in notes
    assert status == 1


def test_a_backfill_whose_last_night_is_cancelled_has_nothing_left_to_run(
    signalled_backfill: Callable[[str, signal.Signals], tuple[int, list[dict[str, Any]], bytes]],
) -> None:
    status, (only,), notes = signalled_backfill("2026-02-28", signal.SIGINT)

    assert only["status"] == "cancelled"
    assert b"was stopped" not in notes
    assert status == 1


def test_a_night_of_today_writes_back_by_its_day_and_a_missing_table_stops_it_before_it_starts(
    wiring: Wiring, blend: Callable[..., dict[str, Any]], nightly_spec: BatchJobSpec, tmp_path: Path
) -> None:
    write_back = {"connection": "shop", "table": "answer_{logical_date:%Y%m%d}", "key_column": "day"}
    write_back["columns"] = {"text": "answer", "status": "state"}  # type: ignore[assignment]
    content = nightly_spec.model_dump(mode="json") | {"write_back": write_back}
    (tmp_path / "night.yaml").write_text(json.dumps(content))
    command = ("run", "night.yaml", "--logical-date", "2026-11-28")
    shop = {"BLEND_TARGETS__SHOP": wiring.endpoints.database_url}

    assert "BLEND_TARGETS__SHOP" in blend(*command, status=2)["error"]["message"]
    assert "no table answer_20261128" in blend(*command, status=2, **shop)["error"]["message"]
    assert jobs_of(wiring, nightly_spec.name) == []

    with psycopg.connect(wiring.endpoints.database_url) as connection:
        connection.execute("CREATE TABLE answer_20261128 (day date PRIMARY KEY, answer text, state text)")
    ran = blend(*command, **shop)
    assert (ran["status"], ran["write_back_error"]) == ("completed", None)
    with psycopg.connect(wiring.endpoints.database_url) as connection:
        ((day, answer, state),) = connection.execute("SELECT * FROM answer_20261128").fetchall()
        assert (day, state) == (date(2026, 11, 28), "succeeded")
        assert answer is not None
        connection.execute("DROP TABLE answer_20261128")
    assert "no table" in blend("write-back", ran["job_id"], status=2, **shop)["error"]["message"]
    status = blend("status", ran["job_id"])
    assert (status["logical_date"], status["write_back"]["num_written"]) == ("2026-11-28", 1)


def test_a_reading_of_new_objects_that_was_stopped_is_continued_and_counts_once(
    wiring: Wiring, tiny_model: str, tmp_path: Path
) -> None:
    name = tmp_path.name
    for number in range(3):
        line = {
            "custom_id": f"id-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
        }
        wiring.objects.put(f"tests/{name}/{number}.jsonl", json.dumps(line).encode())
    folder = wiring.objects.uri(f"tests/{name}/")
    spec = BatchJobSpec(name=name, model=tiny_model, s3=[folder], s3_only_new=True)
    job_id = create_job(wiring, spec)
    stop = StopSignal()

    class StoppingIngest(SilentProgress):
        def counted(self, num_done: int, num_total: int | None) -> None:
            stop.request(StopReason.INTERRUPTED)

    with pytest.raises(RunInterruptedError):
        run_stages(wiring, job_id, StoppingIngest(), stop, lambda name, stage, context: stage(context))
    assert get_job(wiring.database, job_id).ingested_at is None

    # An object that came while the job was not running is new, too.
    wiring.objects.put(f"tests/{name}/3.jsonl", json.dumps({**line, "custom_id": "id-3"}).encode())
    outcome = run_job(wiring, job_id, SilentProgress())
    next_night = run_job(wiring, create_job(wiring, spec), SilentProgress())

    assert (outcome.status, outcome.total, outcome.succeeded) == ("completed", 4, 4)
    assert (next_night.status, next_night.total) == ("completed", 0)
