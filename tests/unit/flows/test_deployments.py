import json
from pathlib import Path

import pytest
from prefect.utilities.schema_tools import validate

from blend_core.errors import ConfigurationError
from flows.deployments import build_deployments
from flows.job_spec import parse_job
from flows.settings import NightlySettings


def write_job(folder: Path) -> Path:
    path = folder / "night.yaml"
    path.write_text(json.dumps({"name": "tickets", "s3": ["s3://bucket/tickets/"], "model": "tiny"}))
    return path


def test_without_a_job_file_the_nightly_schedule_is_inactive_and_says_what_to_set() -> None:
    _, nightly = build_deployments(NightlySettings())

    assert nightly.name == "nightly"
    assert [schedule.active for schedule in nightly.schedules or []] == [False]
    assert "BLEND_NIGHTLY__JOB" in (nightly.description or "")


def test_a_nightly_job_runs_at_its_time_in_its_time_zone(tmp_path: Path) -> None:
    settings = NightlySettings(job=write_job(tmp_path), cron="30 1 * * *", timezone="Europe/Berlin")

    _, nightly = build_deployments(settings)

    (schedule,) = nightly.schedules or []
    assert schedule.active
    assert (schedule.schedule.cron, schedule.schedule.timezone) == ("30 1 * * *", "Europe/Berlin")
    assert nightly.parameters["job"]["s3"] == ["s3://bucket/tickets/"]
    assert "`30 1 * * *` in the time zone Europe/Berlin" in (nightly.description or "")
    assert nightly.parameters["schedule"] == {"cron": "30 1 * * *", "timezone": "Europe/Berlin"}


@pytest.mark.parametrize(("cron", "timezone"), [("at two", "UTC"), ("0 2 * * *", "Middle/Earth")])
def test_a_schedule_that_is_none_is_refused_by_name(tmp_path: Path, cron: str, timezone: str) -> None:
    settings = NightlySettings(job=write_job(tmp_path), cron=cron, timezone=timezone)

    with pytest.raises(ConfigurationError, match="BLEND_NIGHTLY__CRON"):
        build_deployments(settings)


def test_a_schedule_of_several_times_a_day_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="more than once a day"):
        build_deployments(NightlySettings(job=write_job(tmp_path), cron="0 1,2 * * *"))


def test_a_nightly_job_needs_a_name_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "night.yaml"
    path.write_text('{"s3": ["s3://bucket/tickets/"]}')
    with pytest.raises(ConfigurationError, match="known by the job's `name`"):
        build_deployments(NightlySettings(job=path))


def test_a_missing_job_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"gone\.yaml does not exist"):
        build_deployments(NightlySettings(job=tmp_path / "gone.yaml"))


def test_the_form_of_the_ad_hoc_deployment_has_the_fields_of_a_job() -> None:
    ad_hoc, _ = build_deployments(NightlySettings())

    schema = ad_hoc._parameter_openapi_schema
    assert schema.required == ["job"]
    assert set(schema.properties) == {"job", "job_id", "logical_date", "schedule"}
    assert {"model", "s3", "sql", "options", "completion_window_hours"} <= set(
        schema.definitions["BatchJobSpec"]["properties"]
    )


def test_the_form_refuses_what_the_job_would_refuse() -> None:
    ad_hoc, _ = build_deployments(NightlySettings())

    schema = ad_hoc._parameter_openapi_schema.model_dump_for_openapi()
    good = {"job": {"s3": ["s3://bucket/folder/"], "completion_window_hours": 1}}
    validate(good, schema, raise_on_error=True)
    for wrong in ({"s3": ["http://bucket/key"]}, {"s3": ["s3://bucket"]}, {"completion_window_hours": 0}):
        assert validate({"job": good["job"] | wrong}, schema), wrong
        with pytest.raises(ConfigurationError):
            parse_job(good["job"] | wrong, origin="job")


def test_flow_runs_load_the_installed_module() -> None:
    assert {deployment.entrypoint for deployment in build_deployments(NightlySettings())} == {
        "flows.run_batch.run_batch"
    }
