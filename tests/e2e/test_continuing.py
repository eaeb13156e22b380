"""Runs that are ended or killed midway: the next one continues, and nothing with a result runs again."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from blend_core.errors import RunInterruptedError
from flows.lease_holder import holder_details
from flows.progress import SilentProgress
from flows.running import create_job, run_job
from flows.wiring import Wiring
from storage.job_status import JobStatus
from storage.jobs import get_job, request_cancel, set_job_status
from storage.results import counts, iter_results
from storage.runs import start_run
from tests.e2e.watched_run import Watching, engine_pids, rows_by_status, wait_for

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]


def test_a_process_that_is_told_to_end_leaves_the_job_to_be_continued(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=200, max_tokens=100))

    with pytest.raises(RunInterruptedError):
        run_job(wiring, job_id, Watching(20, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert get_job(wiring.database, job_id).status is JobStatus.IN_PROGRESS
    kept = {row.seq: row.run_id for row in rows_by_status(wiring, job_id)["succeeded"]}
    assert 20 <= len(kept) < 200
    outcome = run_job(wiring, job_id, SilentProgress())

    assert (outcome.status, outcome.succeeded) == ("completed", 200)
    after = {row.seq: row.run_id for row in iter_results(wiring.database, job_id)}
    assert kept == {seq: after[seq] for seq in kept}
    assert len(set(after.values())) == 2


def test_a_run_that_waited_while_another_ended_the_job_tells_its_end(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=2))
    details = {**holder_details(), "holder_machine": "elsewhere boot pid:[1]", "holder_pid": "17"}
    other = start_run(wiring.database, job_id, engine="torch", policy="fcfs", details=details, lease_s=20)
    waits = Event()

    class Waiting(SilentProgress):
        def note(self, message: str) -> None:
            waits.set()

    def end_the_job() -> None:
        assert waits.wait(60)
        request_cancel(wiring.database, job_id)
        set_job_status(wiring.database, job_id, JobStatus.CANCELLED, run=other)

    ending = Thread(target=end_the_job)
    ending.start()
    try:
        outcome = run_job(wiring, job_id, Waiting())
    finally:
        ending.join()

    assert (outcome.status, outcome.total) == ("cancelled", 0)


RUN_SCRIPT = """
import sys
from flows.progress import SilentProgress
from flows.running import run_job
from flows.settings import load_settings
from flows.wiring import Endpoints, Wiring

settings = load_settings()
run_job(Wiring.from_settings(settings, Endpoints.from_settings(settings)), sys.argv[1], SilentProgress())
"""


def test_a_killed_process_takes_its_engine_along_and_the_next_run_continues(
    wiring: Wiring, environment: dict[str, str], make_job: Any
) -> None:
    job_id = create_job(wiring, make_job(num_chats=400, max_tokens=60))
    process = subprocess.Popen([sys.executable, "-c", RUN_SCRIPT, job_id], env={**os.environ, **environment})
    wait_for(lambda: counts(wiring.database, job_id).succeeded >= 10, timeout_s=300)
    engines = engine_pids(parent=process.pid)
    assert engines

    process.kill()
    process.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines), timeout_s=5)
    kept = {row.seq: row.run_id for row in rows_by_status(wiring, job_id)["succeeded"]}
    outcome = run_job(wiring, job_id, SilentProgress())

    assert (outcome.status, outcome.succeeded) == ("completed", 400)
    after = {row.seq: row.run_id for row in iter_results(wiring.database, job_id)}
    assert kept == {seq: after[seq] for seq in kept}
    assert len(after) == 400
