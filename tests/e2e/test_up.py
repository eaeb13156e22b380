"""`blend up` again: what it would end is told first, and no job is interrupted without a word."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.job_spec import BatchJobSpec
from flows.lease_holder import holder_details
from flows.running import create_job
from flows.wiring import Wiring
from storage.runs import RunStatus, finish_run, start_run
from tests.e2e.command_line import Blend, blend_in

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.prefect, pytest.mark.slow]


@pytest.fixture
def blend(environment: dict[str, str], tmp_path: Path) -> Iterator[Blend]:
    """Runs `blend ARGUMENTS` with a state folder of its own; ends its services."""
    variables = os.environ | environment | {"BLEND_HOME": str(tmp_path / "home")}
    variables.pop("PREFECT_API_URL", None)
    run = blend_in(tmp_path, variables)
    yield run
    run("down")


def test_up_with_other_settings_interrupts_no_job_and_tells_which_night_ends(
    wiring: Wiring, blend: Blend, tmp_path: Path
) -> None:
    def up() -> dict[str, Any]:
        told: dict[str, Any] = json.loads(blend("up", "--json").stdout)
        return told

    def serving_pid() -> int:
        services = json.loads(blend("status", "--json").stdout)["services"]
        return next(int(service["pid"]) for service in services if service["name"] == "serve")

    spec = BatchJobSpec(name=tmp_path.name, s3=["s3://b/{logical_date}/"])
    (tmp_path / "night.yaml").write_text(spec.model_dump_json())
    file = tmp_path / "home" / "blend.env"
    file.parent.mkdir()
    file.write_text(f"BLEND_NIGHTLY__JOB={tmp_path / 'night.yaml'}\n")

    told = up()
    assert (told["nightly_job"], told["nights_unscheduled"]) == (str(tmp_path / "night.yaml"), [])
    assert told["next_night_at"] is not None

    pid = serving_pid()
    held_there = {
        "holder_pid": str(pid),
        "holder_started_at_s": str(psutil.Process(pid).create_time()),
    }
    job_id = create_job(wiring, spec)
    details = holder_details() | held_there
    run = start_run(wiring.database, job_id, engine="torch", policy="dfs", details=details, lease_s=600)
    assert up()["nights_unscheduled"] == [], "nothing changed, nothing is started anew"
    file.write_text("")
    refused = blend("up", status=2)
    assert job_id in refused.stderr
    assert "blend down" in refused.stderr
    assert serving_pid() == pid

    finish_run(wiring.database, run, RunStatus.FAILED)
    ended = blend("up", "--json")
    assert json.loads(ended.stdout)["nights_unscheduled"] == [spec.name]
    assert f"nightly job {spec.name!r} was scheduled and is not any more" in ended.stderr
    assert "BLEND_NIGHTLY__JOB is not set" in ended.stderr
    assert str(file) in ended.stderr
    assert serving_pid() != pid
    assert up()["nights_unscheduled"] == []
