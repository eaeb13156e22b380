"""A night of `blend backfill` that goes wrong is told in its row, whatever it was."""

from datetime import date
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blend_core.errors import StorageError, StorageUnavailableError
from flows.cli.nights import _is_left, _run_night
from flows.job_spec import BatchJobSpec
from flows.stopping import StopReason, StopSignal
from flows.wiring import Wiring
from storage.job_status import JobStatus

DAY = date(2026, 11, 29)


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The parts of the platform that a night asks, each of which a test may make fail."""
    fake = SimpleNamespace(status=JobStatus.VALIDATING, ran=[], run=lambda: None, away=0)

    def answer(value: Any) -> Any:
        if fake.away:
            fake.away -= 1
            raise StorageUnavailableError("The database does not answer.")
        return value

    def run_job(_wiring: Any, job_id: str, *_: Any) -> None:
        fake.ran.append(job_id)
        fake.run()
        fake.status = JobStatus.COMPLETED

    def outcome(*_: Any, **__: Any) -> Any:
        nothing = {"succeeded": 0, "total": 0, "error_message": None, "write_back_error": None}
        return answer(SimpleNamespace(status=fake.status.value, **nothing))

    monkeypatch.setattr("flows.nights.create_night", lambda *_, **__: answer(("job_1", True)))
    monkeypatch.setattr("flows.nights.known_night", lambda *_: answer(None))
    monkeypatch.setattr("storage.jobs.get_job", lambda *_: answer(SimpleNamespace(status=fake.status)))
    monkeypatch.setattr("flows.job_outcome.job_outcome", outcome)
    monkeypatch.setattr("flows.running.run_job", run_job)
    monkeypatch.setattr("flows.outage.FIRST_DELAY_S", 0.01)
    return fake


def night(stop: StopSignal | None = None) -> dict[str, Any]:
    wiring = cast(Wiring, SimpleNamespace(database=None))
    return _run_night(wiring, cast(BatchJobSpec, None), DAY, stop or StopSignal())


def test_a_night_that_runs_is_completed(platform: SimpleNamespace) -> None:
    row = night()
    assert (row["job_id"], row["status"], row["error"], platform.ran) == (
        "job_1",
        "completed",
        None,
        ["job_1"],
    )
    assert not _is_left(row)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (StorageError("It cannot."), "It cannot."),
        (RuntimeError("odd"), "unexpected RuntimeError: odd"),
    ],
)
def test_whatever_a_night_raises_is_its_own(platform: SimpleNamespace, error: Exception, told: str) -> None:
    def fail() -> None:
        raise error

    platform.run = fail
    row = night()
    assert (row["status"], row["error"]) == ("validating", told)
    assert _is_left(row)


@pytest.mark.parametrize("reason", [None, StopReason.EXPIRED])
def test_a_database_that_is_away_for_a_moment_is_asked_again(
    platform: SimpleNamespace, reason: StopReason | None
) -> None:
    stop = StopSignal()
    if reason is not None:
        stop.request(reason)
    platform.away = 2
    row = night(stop)
    assert row["error"] is None
    assert row["status"] == ("completed" if reason is None else "not_begun")

    def go_away() -> None:
        platform.away = 2

    if reason is None:
        platform.run, platform.status = go_away, JobStatus.VALIDATING
        assert night()["status"] == "completed"


def test_a_database_that_stays_away_leaves_the_night_unknown(
    platform: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.outage.GIVE_UP_AFTER_S", 0.0)

    def go_away() -> None:
        platform.away = 100

    platform.run = go_away
    row = night()
    assert (row["job_id"], row["status"], row["error"]) == (
        "job_1",
        "unknown",
        "The database does not answer.",
    )
    assert _is_left(row)
