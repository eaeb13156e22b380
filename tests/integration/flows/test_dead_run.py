"""A dead run's job: taken over at once where the process is known to be dead, else after its lease."""

import subprocess
import sys
import time

import pytest

from blend_core.errors import StaleRunError, StorageError
from flows.lease_holder import holder_details
from flows.progress import SilentProgress
from flows.run_lease import free_dead_run, take_job
from flows.stopping import StopSignal
from storage.database import Database
from storage.jobs import create_job
from storage.lost_runs import live_run
from storage.runs import Run, heartbeat, start_run

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


def take(db: Database, job_id: str) -> Run:
    return take_job(
        db,
        job_id,
        engine="torch",
        policy="fcfs",
        progress=SilentProgress(),
        stop=StopSignal(),
        wait_for_lease=False,
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


def test_a_run_that_died_when_its_job_had_ended_is_written_off(db: Database, job_id: str) -> None:
    assert not free_dead_run(db, job_id)
    die_holding(db, job_id)

    assert free_dead_run(db, job_id)
    assert live_run(db, job_id) is None
