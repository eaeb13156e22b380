"""The demo as a whole, on a tiny model in the place of the real one."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import psycopg
import pytest

from flows.demo import DEMO_MODEL

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.prefect, pytest.mark.slow]

RUN_MAIN = "from flows.cli import main; main()"


@pytest.fixture
def demo_environment(
    environment: dict[str, str], prefect_api_url: str, tiny_model: str, tmp_path: Path
) -> dict[str, str]:
    """The stack's environment with a state folder of its own: a tiny model under the name of the demo's."""
    home = tmp_path / "home"
    folder = home / "models" / DEMO_MODEL
    shutil.copytree(tiny_model, folder)
    entry = {"name": DEMO_MODEL, "folder": str(folder), "source": "test"}
    folder.with_name(f"{DEMO_MODEL}.json").write_text(json.dumps(entry))
    return os.environ | environment | {"BLEND_HOME": str(home), "PREFECT_API_URL": prefect_api_url}


def run_demo(environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", RUN_MAIN, "demo", *arguments],
        env=environment,
        cwd=environment["BLEND_HOME"],
        capture_output=True,
        text=True,
        timeout=300,
    )


def num_flow_runs(prefect_api_url: str) -> int:
    request = urllib.request.Request(
        f"{prefect_api_url}/flow_runs/count", b"{}", {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(answer.read())


def test_the_demo_runs_as_a_flow_and_prints_one_object(
    demo_environment: dict[str, str], prefect_api_url: str
) -> None:
    before = num_flow_runs(prefect_api_url)
    done = run_demo(demo_environment, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert list(told) == [
        "job_id",
        "status",
        "total",
        "succeeded",
        "errored",
        "expired",
        "cancelled",
        "duration_s",
        "tokens_per_s",
        "num_batches",
        "sources",
        "prefix_sharing",
        "database_url",
    ]
    assert told["status"] == "completed"
    assert told["total"] == told["succeeded"] + told["errored"] >= 300
    assert told["errored"] == 6
    assert told["sources"]["s3"] + told["sources"]["postgres"] == told["total"]
    assert min(told["sources"].values()) > 50
    assert 0 < told["prefix_sharing"]["measured"] <= told["prefix_sharing"]["best"] < 1
    assert told["num_batches"] > 0
    assert "without Prefect" not in done.stderr
    assert num_flow_runs(prefect_api_url) == before + 1
    with psycopg.connect(told["database_url"]) as connection:
        query = "SELECT count(*), count(DISTINCT error_code) FROM request_result WHERE job_id = %s"
        assert connection.execute(query, (told["job_id"],)).fetchone() == (told["total"], 6)
        with pytest.raises(psycopg.Error):
            connection.execute("DELETE FROM batch_job")


def test_the_demo_runs_without_prefect_and_shows_what_it_found(demo_environment: dict[str, str]) -> None:
    del demo_environment["PREFECT_API_URL"]
    done = run_demo(demo_environment)
    assert done.returncode == 0, done.stderr
    assert "6 errored" in done.stdout
    assert "on a100-80g" in done.stdout
    assert "duplicate_custom_id" in done.stdout
    assert done.stdout.count("SELECT") >= 3
