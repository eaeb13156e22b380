"""One job for each night; missed and stuck nights are found."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from blend_core.errors import ConfigurationError
from flows.job_spec import BatchJobSpec
from flows.nights import NightState, create_night, register, serving_home, troubled_nights
from flows.running import create_job
from flows.settings import NightlySettings, Settings
from flows.wiring import Endpoints, Wiring
from storage.job_status import JobStatus
from storage.jobs import get_job, set_job_status
from storage.nights import Nightly, forget_nightlies, list_nightlies
from storage.runs import RunStatus, finish_run, start_run

pytestmark = pytest.mark.postgres

DAY = date(2026, 11, 28)


@pytest.fixture
def wiring(postgres_url: str, tmp_path: Path) -> Iterator[Wiring]:
    settings = Settings(home=tmp_path, nightly=NightlySettings(timezone="Pacific/Kiritimati"))
    parts = Wiring.from_settings(settings, Endpoints(database_url=postgres_url))
    parts.database.upgrade()
    yield parts
    parts.close()


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> BatchJobSpec:
    return BatchJobSpec(name=f"{request.node.name} {{logical_date}}", s3=["s3://b/{logical_date}/"])


def served_since(wiring: Wiring, spec: BatchJobSpec, since: datetime) -> Nightly:
    register(wiring, spec, "30 2 * * *", "Europe/Berlin")
    with wiring.database.connect() as connection:
        connection.execute(
            sa.text("UPDATE nightly SET since = :since WHERE name = :name"),
            {"since": since, "name": spec.name},
        )
    return register(wiring, spec, "30 2 * * *", "Europe/Berlin")


def test_a_night_has_one_job_whoever_asks(wiring: Wiring, spec: BatchJobSpec) -> None:
    job_id, is_new = create_night(wiring, spec, DAY)
    assert is_new
    assert create_night(wiring, spec, DAY) == (job_id, False)
    assert create_night(wiring, spec, DAY, again=True) == (job_id, False)
    job = get_job(wiring.database, job_id)
    assert (job.logical_date, job.nightly) == (DAY, spec.name)
    assert job.name == spec.name.replace("{logical_date}", "2026-11-28")
    assert create_night(wiring, spec, DAY + timedelta(1))[0] != job_id


@pytest.mark.parametrize("end", [JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.EXPIRED])
def test_a_night_that_did_not_complete_gets_a_new_job_when_asked_to(
    wiring: Wiring, spec: BatchJobSpec, end: JobStatus
) -> None:
    first, _ = create_night(wiring, spec, DAY)
    set_job_status(wiring.database, first, end)
    assert create_night(wiring, spec, DAY) == (first, False)
    second, is_new = create_night(wiring, spec, DAY, again=True)
    assert is_new
    assert second != first
    assert create_night(wiring, spec, DAY, again=True) == (second, False)


def test_a_key_is_of_one_job_and_refused_for_another(wiring: Wiring, spec: BatchJobSpec) -> None:
    job_id = create_job(wiring, spec, "tickets 2026-11-28", logical_date=DAY)
    same = BatchJobSpec.model_validate(spec.model_dump(mode="json"))
    assert create_job(wiring, same, "tickets 2026-11-28") == job_id
    assert create_job(wiring, same, "tickets 2026-11-28", logical_date=DAY) == job_id
    with pytest.raises(ConfigurationError, match=rf"belongs to job {job_id}, .* give another key for"):
        create_job(wiring, same, "tickets 2026-11-28", logical_date=DAY + timedelta(1))
    other = spec.model_copy(update={"s3": ["s3://b/other/"]})
    with pytest.raises(ConfigurationError, match=rf"belongs to job {job_id}, .* give another key"):
        create_job(wiring, other, "tickets 2026-11-28", logical_date=DAY)


def test_a_completed_night_is_left_alone(wiring: Wiring, spec: BatchJobSpec) -> None:
    job_id, _ = create_night(wiring, spec, DAY)
    set_job_status(wiring.database, job_id, JobStatus.FINALIZING)
    set_job_status(wiring.database, job_id, JobStatus.COMPLETED)
    assert create_night(wiring, spec, DAY, again=True) == (job_id, False)


def test_a_job_without_a_day_is_about_today_in_the_configured_zone(
    wiring: Wiring, spec: BatchJobSpec
) -> None:
    before = (datetime.now(tz=UTC) + timedelta(hours=14)).date()
    job = get_job(wiring.database, create_job(wiring, spec))
    assert before <= job.logical_date <= (datetime.now(tz=UTC) + timedelta(hours=14)).date()
    assert job.nightly is None


def test_nights_without_a_job_are_missed_and_jobs_that_nothing_runs_are_stuck(
    wiring: Wiring, spec: BatchJobSpec
) -> None:
    now = datetime(2026, 11, 29, 1, 44, tzinfo=UTC)
    nightly = served_since(wiring, spec, datetime(2026, 11, 25, 12, tzinfo=UTC))
    done, _ = create_night(wiring, spec, date(2026, 11, 26))
    set_job_status(wiring.database, done, JobStatus.FAILED)
    stuck, _ = create_night(wiring, spec, date(2026, 11, 28))

    found = troubled_nights(wiring.database, nightly, now)
    assert [(night.logical_date.day, night.state, night.job_id) for night in found] == [
        (27, NightState.MISSED, None),
        (28, NightState.STUCK, stuck),
    ], "the night of the 29th was due 14 minutes ago"
    later = troubled_nights(wiring.database, nightly, now + timedelta(minutes=1))
    assert (later[-1].logical_date.day, later[-1].state) == (29, NightState.MISSED)

    run = start_run(wiring.database, stuck, engine="torch", policy="dfs", details={}, lease_s=60)
    assert [night.logical_date.day for night in troubled_nights(wiring.database, nightly, now)] == [27]
    finish_run(wiring.database, run, RunStatus.FAILED)
    assert len(troubled_nights(wiring.database, nightly, now)) == 2


def test_nights_count_from_the_first_time_on_a_schedule(wiring: Wiring, spec: BatchJobSpec) -> None:
    since = datetime(2026, 11, 1, tzinfo=UTC)
    assert served_since(wiring, spec, since).since == since
    assert register(wiring, spec, "0 4 * * *", "Europe/Berlin").since > since


def test_what_is_not_served_any_more_is_forgotten(wiring: Wiring, spec: BatchJobSpec) -> None:
    register(wiring, spec, "30 2 * * *", "UTC")
    other = spec.model_copy(update={"name": "other"})
    register(wiring, other, "30 2 * * *", "UTC")
    forget_nightlies(wiring.database, "another machine")
    forget_nightlies(wiring.database, serving_home(wiring.settings), but="other")
    names = [nightly.name for nightly in list_nightlies(wiring.database)]
    assert "other" in names
    assert spec.name not in names
