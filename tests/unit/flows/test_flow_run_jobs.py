"""Jobs of one flow run: what goes wrong with one holds up no other, and leaves nothing open."""

import logging
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import Completed, Failed

from blend_core.errors import StorageError
from flows import run_batch
from flows.job_spec import BatchJobSpec
from flows.nights import NightState, TroubledNight
from flows.stopping import StopSignal

JOB = BatchJobSpec(name="tickets", s3=["s3://b/k"])
NIGHT = TroubledNight(date(2026, 11, 28), NightState.STUCK, "job_1")


def catch_up(run: Any) -> None:
    logger = logging.getLogger("test.catch_up")
    run_batch._catch_up(SimpleNamespace(stop=StopSignal(), logger=logger, run=run), JOB, NIGHT)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [StorageError("The disk is full."), RuntimeError("a prompt"), KeyError("x")]
)
def test_no_failure_of_a_night_that_is_caught_up_with_reaches_the_next(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(job_id: str) -> Any:
        raise error

    catch_up(fail)

    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "Night 2026-11-28 could not be caught up with" in record.message
    assert "prompt" not in record.message


@pytest.mark.parametrize(
    ("state", "level"),
    [(Completed(message="completed"), logging.INFO), (Failed(message="expired"), logging.WARNING)],
)
def test_a_night_that_is_caught_up_with_and_expires_is_a_warning(
    caplog: pytest.LogCaptureFixture, state: Any, level: int
) -> None:
    caplog.set_level(logging.INFO)

    catch_up(lambda job_id: state)

    (record,) = caplog.records
    assert (record.levelno, record.message.split(": ")[1]) == (level, state.message)


def test_a_run_that_fails_leaves_no_progress_open(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr(run_batch.PrefectProgress, "end", lambda self: ended.append(True))

    def fail(*arguments: Any, **options: Any) -> Any:
        raise StorageError("The disk is full.")

    monkeypatch.setattr(run_batch, "run_stages", fail)
    run = run_batch._FlowRun(SimpleNamespace(), logging.getLogger("test"), StopSignal())  # type: ignore[arg-type]

    with pytest.raises(StorageError):
        run.run("job_1")

    assert ended == [True]
