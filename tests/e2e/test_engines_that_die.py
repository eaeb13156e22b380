"""Engines that are killed, hang or die for good: every request gets one result, by this run or the next."""

import os
import signal
import threading
from typing import Any

import pytest
import sqlalchemy as sa

from blend_core.errors import EngineDiedError, StorageUnavailableError
from flows.device_lock import device_lock
from flows.progress import SilentProgress
from flows.running import create_job, run_job
from flows.stopping import StopSignal
from flows.wiring import Wiring
from storage.job_status import JobStatus
from storage.jobs import get_job
from storage.results import counts, iter_results
from tests.e2e.watched_run import Watching, assert_sums_hold, engine_pids, kill_engine, rows_by_status

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]


class KillingEveryEngine(SilentProgress):
    """Kills each engine at its first window."""

    def window(self, window: Any, rank: int) -> None:
        kill_engine()


def test_a_killed_engine_is_started_again_and_every_request_gets_one_result(
    wiring: Wiring, make_job: Any
) -> None:
    job_id = create_job(wiring, make_job(num_chats=60, max_tokens=24))
    watching = Watching(10, kill_engine)

    outcome = run_job(wiring, job_id, watching)

    assert (outcome.status, outcome.total, outcome.succeeded) == ("completed", 60, 60)
    assert any("SIGKILL" in note for note in watching.notes)
    assert len({row.seq for row in iter_results(wiring.database, job_id)}) == 60
    assert_sums_hold(wiring, job_id, 60)
    assert engine_pids() == []


def test_an_engine_that_dies_again_and_again_fails_the_run_and_the_next_run_continues(
    wiring: Wiring, make_job: Any
) -> None:
    # Two restarts, since each costs a load of the model; how many there are is the budget's own test.
    wiring.settings.engine = wiring.settings.engine.model_copy(update={"max_restarts": 2})
    # A policy that starts many at once: few would soon be alone, and set aside before the engine is given up.
    spec = make_job(num_chats=300, max_tokens=100, options={"policy": "dual_scan"})
    job_id = create_job(wiring, spec)

    with pytest.raises(EngineDiedError):
        run_job(wiring, job_id, KillingEveryEngine())
    job = get_job(wiring.database, job_id)
    assert job.status is JobStatus.IN_PROGRESS
    kept = {row.seq: row.run_id for row in rows_by_status(wiring, job_id).get("succeeded", [])}
    outcome = run_job(wiring, job_id, SilentProgress())

    assert (outcome.status, outcome.succeeded) == ("completed", 300)
    assert kept == {row.seq: row.run_id for row in iter_results(wiring.database, job_id) if row.seq in kept}
    assert_sums_hold(wiring, job_id, 300)


def test_an_engine_that_hangs_is_ended_and_its_requests_run_again(wiring: Wiring, make_job: Any) -> None:
    wiring.settings.engine = wiring.settings.engine.model_copy(update={"stall_limit_s": 5.0})
    job_id = create_job(wiring, make_job(num_chats=200, max_tokens=60))
    watching = Watching(10, lambda: [os.kill(pid, signal.SIGSTOP) for pid in engine_pids()])

    outcome = run_job(wiring, job_id, watching)

    assert (outcome.status, outcome.succeeded) == ("completed", 200)
    assert any("SIGKILL" in note for note in watching.notes)


class AwayAfterAWindow(SilentProgress):
    """The database is away once, when the first window has been recorded."""

    def __init__(self) -> None:
        self.num_windows = 0
        self._is_due = True

    def window(self, window: Any, rank: int) -> None:
        self.num_windows += 1

    def counted(self, num_done: int, num_total: int | None) -> None:
        if self.num_windows and self._is_due:
            self._is_due = False
            raise StorageUnavailableError("The database did not answer.")


def test_a_stage_that_is_done_again_numbers_its_windows_on(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=60, max_tokens=40))
    away = AwayAfterAWindow()

    outcome = run_job(wiring, job_id, away)

    assert (outcome.status, outcome.succeeded) == ("completed", 60)
    with wiring.database.connect() as connection:
        windows = connection.execute(
            sa.text("SELECT count(*), max(batch_index) + 1 FROM batch_metric WHERE job_id = :job_id"),
            {"job_id": job_id},
        ).one()
    assert tuple(windows) == (away.num_windows, away.num_windows)


def test_one_engine_at_a_time_runs_on_a_device(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=5))
    free = threading.Event()
    waiting = threading.Event()

    class Noting(SilentProgress):
        notes: list[str] = []  # noqa: RUF012 - one object is made

        def note(self, message: str) -> None:
            self.notes.append(message)
            waiting.set()

    device = f"{os.uname().nodename}:{wiring.settings.engine.device}"
    progress = Noting()
    thread = threading.Thread(target=run_job, args=(wiring, job_id, progress))
    with device_lock(
        wiring.database, device=device, job_id="job_other", stop=StopSignal(), waiting=lambda line: None
    ) as held:
        assert held
        thread.start()
        assert waiting.wait(60)
        assert counts(wiring.database, job_id).succeeded == 0
        free.set()
    thread.join(60)

    assert "job_other" in progress.notes[0]
    assert counts(wiring.database, job_id).succeeded == 5
