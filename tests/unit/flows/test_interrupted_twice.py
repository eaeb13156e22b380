"""A second interrupt ends a run within moments, also while the database is away."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from blend_core.engines.base import RequestFinished
from flows.run_lease import held_job
from flows.stopping import StopSignal
from storage.database import Database
from storage.object_client import ObjectStoreOptions
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.recorder import Recorder

RUN = Run(run_id="run_x", job_id="job_x", fencing_number=1)


@pytest.fixture
def away(closed_port: int) -> Database:
    """A database whose server is not there."""
    return Database(f"postgresql://me:secret@127.0.0.1:{closed_port}/blend")


@contextmanager
def at_once() -> Iterator[None]:
    started_s = time.monotonic()
    yield
    # Without an interrupt it is ten minutes.
    assert time.monotonic() - started_s < 60


def test_the_recorder_waits_for_no_database_then(away: Database, closed_port: int) -> None:
    store = ObjectStore(ObjectStoreOptions("b", f"http://127.0.0.1:{closed_port}", "a", "b"))
    answer = RequestFinished(0, 0, "Paris.", (1,), "stop", 10, 4, 1.0, 2.0)

    def interrupted() -> None:
        with Recorder(away, store, RUN, flush_interval_s=0.01) as recorder:
            recorder.finished(answer)
            time.sleep(0.5)
            raise KeyboardInterrupt

    with at_once(), pytest.raises(KeyboardInterrupt):
        interrupted()


def test_an_interrupt_of_a_held_job_stays_an_interrupt(away: Database) -> None:
    def interrupted() -> None:
        with held_job(away, RUN, StopSignal()):
            raise KeyboardInterrupt

    with at_once(), pytest.raises(KeyboardInterrupt):
        interrupted()
