"""A device belongs to one run, also when the database drops the session that says so."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import psycopg
import pytest

from blend_core.errors import RunInterruptedError
from flows import device_lock as module
from flows.cli.job_standing import waiting_line
from flows.device_lock import device_lock
from flows.stages.infer import hold_devices
from flows.stopping import StopReason, StopSignal
from storage.database import Database
from storage.jobs import create_job
from storage.lost_runs import live_run
from storage.runs import start_run

pytestmark = pytest.mark.postgres

END_SESSIONS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s"


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.1)
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.1)


@contextmanager
def lock(
    db: Database, job_id: str, stop: StopSignal, waiting: threading.Event | None = None
) -> Iterator[bool]:
    told = waiting or threading.Event()
    with device_lock(
        db, device="here:cpu", job_id=job_id, stop=stop, waiting=lambda line: told.set()
    ) as held:
        yield held


def end_session(db: Database, job_id: str) -> None:
    with psycopg.connect(db.url, autocommit=True) as connection:
        ended = connection.execute(END_SESSIONS, (f"blend engine of {job_id}",)).fetchall()
    assert ended == [(True,)]


def sessions(db: Database, job_id: str) -> int:
    with psycopg.connect(db.url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity JOIN pg_locks USING (pid)"
            " WHERE application_name = %s AND locktype = 'advisory' AND granted",
            (f"blend engine of {job_id}",),
        ).fetchone()
    assert row is not None
    return int(row[0])


def wait_until_held(db: Database, job_id: str) -> None:
    pause = threading.Event()
    for _ in range(100):
        if sessions(db, job_id) == 1:
            return
        pause.wait(0.1)
    raise AssertionError("the lock was not taken")


def test_a_wait_goes_on_after_its_session_was_ended(db: Database) -> None:
    waiting, got = threading.Event(), threading.Event()

    def second() -> None:
        with lock(db, "job_b", StopSignal(), waiting) as held:
            if held:
                got.set()

    thread = threading.Thread(target=second)
    with lock(db, "job_a", StopSignal()) as held:
        assert held
        thread.start()
        assert waiting.wait(10)
        end_session(db, "job_b")
        assert not got.wait(0.5)
    thread.join(10)

    assert got.is_set()


def test_a_lock_whose_session_was_ended_is_taken_again(db: Database) -> None:
    stop = StopSignal()
    with lock(db, "job_a", stop) as held:
        assert held
        end_session(db, "job_a")
        wait_until_held(db, "job_a")
    assert stop.reason is None
    assert sessions(db, "job_a") == 0


def test_a_run_whose_device_was_taken_stops_and_may_be_run_again(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 1.0)
    stop, given_back = StopSignal(), threading.Event()

    def other() -> None:
        with lock(db, "job_b", StopSignal()) as held:
            assert held
            given_back.wait(30)

    thread = threading.Thread(target=other)

    def lose_it() -> None:
        with lock(db, "job_a", stop) as held:
            assert held
            end_session(db, "job_a")
            thread.start()
            assert stop.wait(10)

    try:
        with pytest.raises(RunInterruptedError, match="job_b took it; run job job_a again") as caught:
            lose_it()
    finally:
        given_back.set()
        thread.join(10)
    assert stop.reason is StopReason.INTERRUPTED
    assert caught.value.retryable


def test_a_cancelled_wait_ends_without_the_lock(db: Database) -> None:
    stop = StopSignal()
    stop.request(StopReason.CANCELLED)
    with lock(db, "job_a", StopSignal()), lock(db, "job_b", stop) as held:
        assert not held


@pytest.mark.parametrize(("devices", "visible"), [(("cuda:0,1",), ""), (("cuda:0",), "1")])
def test_a_run_waits_for_the_run_on_any_of_its_gpus(
    db: Database, devices: tuple[str, ...], visible: str
) -> None:
    stop, notes = StopSignal(), []

    def note(line: str) -> None:
        notes.append(line)
        stop.request(StopReason.CANCELLED)

    job_id = create_job(db, name="b", model="m", spec={})
    context = SimpleNamespace(
        wiring=SimpleNamespace(database=db, settings=SimpleNamespace(visible_gpus=visible)),
        job_id=job_id,
        run=start_run(db, job_id, engine="torch", policy="dfs", details={}, lease_s=600),
        stop=stop,
        progress=SimpleNamespace(note=note),
    )
    other = device_lock(
        db, device=f"{os.uname().nodename}:cuda:1", job_id="job_a", stop=StopSignal(), waiting=notes.append
    )
    with other as got, ExitStack() as held:
        assert got
        assert hold_devices(context, devices, held) is None  # type: ignore[arg-type]  # what it reads of one
    assert notes == [f"Waiting for {os.uname().nodename}:cuda:1: blend engine of job_a runs on it."]
    live = live_run(db, job_id)
    assert live is not None
    assert waiting_line(live) == notes[0]


def test_a_run_that_has_its_device_waits_for_nothing_any_more(db: Database) -> None:
    device, is_waiting = f"{os.uname().nodename}:cpu", threading.Event()
    job_id = create_job(db, name="b", model="m", spec={})
    context = SimpleNamespace(
        wiring=SimpleNamespace(database=db, settings=SimpleNamespace(visible_gpus=None)),
        job_id=job_id,
        run=start_run(db, job_id, engine="torch", policy="dfs", details={}, lease_s=600),
        stop=StopSignal(),
        progress=SimpleNamespace(note=lambda line: is_waiting.set()),
    )

    def give_up() -> None:
        with device_lock(db, device=device, job_id="job_a", stop=StopSignal(), waiting=str):
            is_held.set()
            assert is_waiting.wait(30)

    is_held, other = threading.Event(), threading.Thread(target=give_up)
    other.start()
    assert is_held.wait(30)
    with ExitStack() as held:
        assert hold_devices(context, ("cpu",), held) is not None  # type: ignore[arg-type]
    other.join()
    live = live_run(db, job_id)
    assert live is not None
    assert waiting_line(live) is None
