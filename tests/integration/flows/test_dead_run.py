"""A dead run's job: taken over at once where the process is known to be dead, else after its lease."""

import subprocess
import sys
import time

import pytest

from blend_core.errors import RunInterruptedError, StaleRunError, StorageError
from flows.heartbeat import Heartbeat
from flows.lease_holder import holder_details
from flows.progress import Progress, SilentProgress
from flows.run_lease import free_dead_run, take_job
from flows.stopping import StopReason, StopSignal
from storage.database import Database
from storage.job_status import JobStatus
from storage.jobs import create_job, request_cancel, set_job_status
from storage.lost_runs import live_run, mark_lost, stopped_jobs, unbegun_jobs
from storage.runs import Run, heartbeat, start_run
from tests.older_job import make_older

pytestmark = pytest.mark.postgres

TAKE_AND_DIE = """
import os, sys
from flows.progress import SilentProgress
from flows.run_lease import take_job
from flows.stopping import StopSignal
from storage.database import Database

db = Database(sys.argv[1])
take_job(
    db, sys.argv[2], engine="torch", policy="fcfs", progress=SilentProgress(), stop=StopSignal(),
    wait_for_lease=False,
)
os._exit(1)
"""


@pytest.fixture
def job_id(db: Database) -> str:
    return create_job(db, name="test", model="tiny", spec={})


def take(
    db: Database,
    job_id: str,
    progress: Progress | None = None,
    *,
    wait_for_lease: bool = False,
    stop: StopSignal | None = None,
) -> Run:
    return take_job(
        db,
        job_id,
        engine="torch",
        policy="fcfs",
        progress=progress or SilentProgress(),
        stop=stop or StopSignal(),
        wait_for_lease=wait_for_lease,
    )


def die_holding(db: Database, job_id: str) -> None:
    subprocess.run([sys.executable, "-c", TAKE_AND_DIE, db.url, job_id], check=False, timeout=120)


def test_the_job_of_a_process_that_died_is_taken_at_once(db: Database, job_id: str) -> None:
    die_holding(db, job_id)
    dead = live_run(db, job_id)
    assert dead is not None

    started_s = time.monotonic()
    run = take(db, job_id)

    # The dead run's lease is 30 s.
    assert time.monotonic() - started_s < 20
    now = live_run(db, job_id)
    assert now is not None
    assert now.run_id == run.run_id != dead.run_id
    with pytest.raises(StaleRunError):
        heartbeat(db, Run(dead.run_id, job_id, run.fencing_number - 1), lease_s=30)


def test_the_job_of_a_process_that_lives_is_not_taken(db: Database, job_id: str) -> None:
    take(db, job_id)

    with pytest.raises(StorageError) as live:
        take(db, job_id)
    assert "lease_left_s" in live.value.ids


def test_the_job_of_a_process_elsewhere_is_not_taken_while_its_lease_lasts(db: Database, job_id: str) -> None:
    details = {**holder_details(), "holder_machine": "elsewhere", "holder_pid": "1"}
    start_run(db, job_id, engine="torch", policy="fcfs", details=details, lease_s=60)

    with pytest.raises(StorageError) as live:
        take(db, job_id)
    assert "lease_left_s" in live.value.ids


class Noting(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def hold_elsewhere(db: Database, job_id: str, lease_s: float) -> Run:
    details = {**holder_details(), "holder_machine": "elsewhere boot pid:[1]", "holder_pid": "17"}
    return start_run(db, job_id, engine="torch", policy="fcfs", details=details, lease_s=lease_s)


def test_the_lease_of_a_process_elsewhere_is_waited_for_and_its_job_taken_over(
    db: Database, job_id: str
) -> None:
    other = hold_elsewhere(db, job_id, lease_s=2)
    progress = Noting()

    run = take(db, job_id, progress, wait_for_lease=True)

    now = live_run(db, job_id)
    assert now is not None
    assert now.run_id == run.run_id != other.run_id
    (note,) = progress.notes
    assert note.startswith(f"Job {job_id} has been held by process 17 on elsewhere since 2")
    assert "Waiting up to 2 s" in note


def test_a_job_whose_process_elsewhere_shows_signs_of_life_is_refused(
    db: Database, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Waits 20.5 s for a lease of 20 s, as 35 s for one of 30 s, and refuses once that was renewed.
    monkeypatch.setattr("flows.run_lease.LEASE_S", 15.5)
    other = hold_elsewhere(db, job_id, lease_s=20)
    progress = Noting()

    with (
        Heartbeat("other", 0.2, lambda: heartbeat(db, other, lease_s=20)),
        pytest.raises(StorageError) as refused,
    ):
        take(db, job_id, progress, wait_for_lease=True)

    assert len(progress.notes) == 1
    told = str(refused.value)
    assert told.startswith(f"Job {job_id} has been held by process 17 on elsewhere since 2")
    assert "it is at work" in told
    assert f"`blend status {job_id}`" in told
    now = live_run(db, job_id)
    assert now is not None
    assert now.run_id == other.run_id


def test_a_wait_for_a_lease_ends_when_the_process_is_told_to(db: Database, job_id: str) -> None:
    hold_elsewhere(db, job_id, lease_s=20)
    stop = StopSignal()
    stop.request(StopReason.INTERRUPTED)

    with pytest.raises(RunInterruptedError, match="run it again"):
        take(db, job_id, wait_for_lease=True, stop=stop)


def test_a_run_that_died_when_its_job_had_ended_is_written_off(db: Database, job_id: str) -> None:
    assert not free_dead_run(db, job_id)
    die_holding(db, job_id)

    assert free_dead_run(db, job_id)
    assert live_run(db, job_id) is None


def test_a_job_that_was_begun_and_that_nothing_runs_is_found(db: Database, job_id: str) -> None:
    def is_stopped() -> bool:
        return job_id in {job.job_id for job in stopped_jobs(db)}

    def is_unbegun() -> bool:
        return job_id in {job.job_id for job in unbegun_jobs(db)}

    # Whoever made it is about to begin it.
    assert (is_stopped(), is_unbegun()) == (False, False)
    make_older(db, job_id)
    # One that waits for its first run may be queued.
    assert (is_stopped(), is_unbegun()) == (False, True)
    first = hold_elsewhere(db, job_id, lease_s=30)
    assert (is_stopped(), is_unbegun()) == (False, False)
    mark_lost(db, first.run_id)
    assert is_stopped()
    second = hold_elsewhere(db, job_id, lease_s=30)
    assert not is_stopped()
    heartbeat(db, second, lease_s=-1)
    assert is_stopped()
    request_cancel(db, job_id)
    set_job_status(db, job_id, JobStatus.CANCELLED, run=second)
    assert not is_stopped()
