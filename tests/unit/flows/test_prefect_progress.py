"""The progress artifact of a flow run: there at once, moved seldom, never in the way of the run."""

import logging
import threading
from uuid import UUID, uuid4

import pytest

from flows import progress_artifact
from flows.progress_artifact import ARTIFACT_INTERVAL_S, PrefectProgress, ProgressArtifact

Shown = list[tuple[float, str]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """What is to be shown, as (percent, description)."""
    told: Shown = []
    monkeypatch.setattr(
        ProgressArtifact, "show", lambda self, percent, description: told.append((percent, description))
    )
    return told


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> PrefectProgress:
    return PrefectProgress(logging.getLogger("test"), clock)


def test_it_is_there_from_the_first_stage_on(progress: PrefectProgress, shown: Shown) -> None:
    progress.stage_started("ingest", "reads and checks the sources")

    assert shown == [(0.0, "ingest: reads and checks the sources")]


def test_counts_move_it_at_most_once_an_interval(
    progress: PrefectProgress, shown: Shown, clock: Clock
) -> None:
    progress.stage_started("ingest", "reads")
    for number in range(1_000):
        progress.counted(number, None)
    assert len(shown) == 1
    clock.now_s += ARTIFACT_INTERVAL_S
    progress.counted(1_000, None)
    progress.counted(1_001, None)
    clock.now_s += ARTIFACT_INTERVAL_S
    progress.counted(25, 100)

    assert shown[1:] == [(0.0, "ingest: 1,000 lines and rows so far"), (25.0, "25%, 25 of 100 requests")]


def test_a_job_that_stops_early_keeps_its_bar_where_it_was(progress: PrefectProgress, shown: Shown) -> None:
    progress.stage_started("infer", "runs m")
    progress.counted(21, 100)
    progress.stage_finished("infer", "21 succeeded")
    progress.stage_finished("report", "21 succeeded + 79 cancelled = 100")

    assert shown[-1] == (21.0, "21 succeeded + 79 cancelled = 100")


def test_a_job_with_nothing_to_run_is_done_at_its_report(progress: PrefectProgress, shown: Shown) -> None:
    progress.stage_started("ingest", "reads")
    progress.stage_finished("report", "2 errored = 2")

    assert shown[-1] == (100.0, "2 errored = 2")


def test_a_prefect_that_does_not_answer_disturbs_nothing(
    progress: PrefectProgress, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise ConnectionError("secret")

    monkeypatch.setattr(progress_artifact, "create_progress_artifact", refuse)
    progress.stage_started("ingest", "reads")
    progress.end()

    assert "ConnectionError" in caplog.text
    assert "secret" not in caplog.text


def test_a_prefect_that_answers_slowly_holds_nobody_up_and_gets_the_latest(
    progress: PrefectProgress, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: Shown = []
    answer = threading.Event()
    artifact_id = uuid4()

    def create(percent: float, *, key: str, description: str) -> UUID:
        assert answer.wait(30)
        written.append((percent, description))
        return artifact_id

    def update(written_id: UUID, percent: float, *, description: str) -> None:
        assert written_id == artifact_id
        written.append((percent, description))

    monkeypatch.setattr(progress_artifact, "create_progress_artifact", create)
    monkeypatch.setattr(progress_artifact, "update_progress_artifact", update)
    progress.stage_started("infer", "runs m")
    for number in range(1, 50):
        clock.now_s += ARTIFACT_INTERVAL_S
        progress.counted(number, 100)
    assert written == []
    answer.set()
    progress.end()

    assert len(written) <= 3
    assert written[-1][0] == 49.0
