"""Jobs that are cancelled, expire, are interrupted, or lose their engine: nothing lost, nothing run twice."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from blend_core.errors import (
    ConfigurationError,
    EngineDiedError,
    RunInterruptedError,
    SourceError,
    StorageUnavailableError,
)
from flows.device_lock import device_lock
from flows.progress import SilentProgress
from flows.running import cancel_job, create_job, run_job, run_stages
from flows.stopping import StopReason, StopSignal
from flows.wiring import Wiring
from storage.job_status import JobStatus
from storage.jobs import get_job, request_cancel
from storage.results import ResultRow, counts, iter_results

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]


class Watching(SilentProgress):
    """Does something once, when enough requests have ended."""

    def __init__(self, num_done: int, action: Callable[[], object]) -> None:
        self.notes: list[str] = []
        self._num_done = num_done
        self._action: Callable[[], object] | None = action
        self._stage = ""

    def stage_started(self, stage: str, detail: str) -> None:
        self._stage = stage

    def counted(self, num_done: int, num_total: int | None) -> None:
        if self._stage == "infer" and num_done >= self._num_done and self._action is not None:
            action, self._action = self._action, None
            action()

    def note(self, message: str) -> None:
        self.notes.append(message)


class KillingEveryEngine(SilentProgress):
    """Kills each engine at its first window."""

    def window(self, window: Any, rank: int) -> None:
        kill_engine()


def wait_for(what: Callable[[], object], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, f"nothing came within {timeout_s:.0f} s"
        time.sleep(0.1)


def engine_pids(parent: int | None = None) -> list[int]:
    """Engine processes that are children of a process, this one by default."""
    wanted = os.getpid() if parent is None else parent
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            actual = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        if actual == wanted and "blend_core.engines.process_child" in command:
            pids.append(int(folder.name))
    return pids


def kill_engine() -> None:
    for pid in engine_pids():
        os.kill(pid, signal.SIGKILL)


def rows_by_status(wiring: Wiring, job_id: str) -> dict[str | None, list[ResultRow]]:
    rows: dict[str | None, list[ResultRow]] = {}
    for row in iter_results(wiring.database, job_id):
        rows.setdefault(row.status, []).append(row)
    return rows


def assert_sums_hold(wiring: Wiring, job_id: str, total: int) -> None:
    standing = counts(wiring.database, job_id)
    rows = rows_by_status(wiring, job_id)
    assert standing.total == total == sum(len(group) for group in rows.values())
    for status in ("succeeded", "errored", "expired", "cancelled"):
        assert getattr(standing, status) == len(rows.get(status, []))
    assert standing.pending == len(rows.get(None, []))


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


def test_a_cancelled_job_keeps_and_exports_what_had_finished(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=600, bad_lines=(b"{",), max_tokens=200))

    outcome = run_job(wiring, job_id, Watching(20, lambda: request_cancel(wiring.database, job_id)))

    assert outcome.status == "cancelled"
    assert outcome.succeeded >= 19
    assert outcome.cancelled >= 1
    assert outcome.output_uris
    assert_sums_hold(wiring, job_id, 601)


def test_a_job_that_is_cancelled_between_stages_ends_as_cancelled(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=5, bad_lines=(b"{",)))

    class CancellingAfterIngest(SilentProgress):
        def stage_finished(self, stage: str, detail: str) -> None:
            if stage == "ingest":
                request_cancel(wiring.database, job_id)

    outcome = run_job(wiring, job_id, CancellingAfterIngest())

    assert (outcome.status, outcome.errored, outcome.cancelled) == ("cancelled", 1, 5)
    assert_sums_hold(wiring, job_id, 6)


def test_a_job_that_is_cancelled_while_it_is_read_ends_with_what_was_read(
    wiring: Wiring, make_job: Any
) -> None:
    job_id = create_job(wiring, make_job(num_chats=30))
    stop = StopSignal()

    class StoppingIngest(SilentProgress):
        def counted(self, num_done: int, num_total: int | None) -> None:
            stop.request(StopReason.CANCELLED)

    outcome = run_stages(wiring, job_id, StoppingIngest(), stop, lambda name, stage, context: stage(context))

    assert outcome.status == "cancelled"
    assert outcome.succeeded == 0
    assert_sums_hold(wiring, job_id, outcome.total)


def test_an_interrupt_cancels_the_job(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=600, max_tokens=200))

    outcome = run_job(wiring, job_id, Watching(20, lambda: os.kill(os.getpid(), signal.SIGINT)))

    assert outcome.status == "cancelled"
    assert outcome.succeeded >= 20
    assert_sums_hold(wiring, job_id, 600)


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


def close_window(wiring: Wiring, job_id: str) -> None:
    with wiring.database.connect() as connection:
        connection.execute(
            sa.text("UPDATE batch_job SET expires_at = clock_timestamp() WHERE job_id = :job_id"),
            {"job_id": job_id},
        )


def test_what_is_not_done_when_the_window_closes_expires(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=1500, max_tokens=200, completion_window_hours=1))

    outcome = run_job(wiring, job_id, Watching(10, lambda: close_window(wiring, job_id)))

    assert outcome.status == "expired"
    assert outcome.succeeded >= 1
    assert outcome.expired >= 1
    assert outcome.output_uris
    assert_sums_hold(wiring, job_id, 1500)


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


@pytest.fixture
def blend_run(
    wiring: Wiring, environment: dict[str, str], make_job: Any, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[bytes], str, list[int]]]:
    """`blend run --on-sigterm cancel` of a long job that has its first answers: process, job, engines."""
    job_id = create_job(wiring, make_job(num_chats=600, max_tokens=200))
    command = [sys.executable, "-c", "from flows.cli import main; main()", "run", "--job-id", job_id]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [*command, "--on-sigterm", "cancel", "--json"], stdout=out, env={**os.environ, **environment}
        )
    try:
        wait_for(lambda: counts(wiring.database, job_id).succeeded >= 10, timeout_s=300)
        yield process, job_id, engine_pids(parent=process.pid)
    finally:
        process.kill()
        process.wait()


def test_sigterm_cancels_the_job_where_that_was_asked_for(
    wiring: Wiring, blend_run: tuple[subprocess.Popen[bytes], str, list[int]], tmp_path: Path
) -> None:
    process, job_id, engines = blend_run
    process.terminate()

    assert process.wait(60) == 1
    outcome = json.loads((tmp_path / "out").read_text())
    assert outcome["status"] == "cancelled"
    assert outcome["succeeded"] >= 10
    assert outcome["output_uris"]
    assert engines
    assert not any(Path(f"/proc/{pid}").exists() for pid in engines)
    assert_sums_hold(wiring, job_id, 600)


def test_a_second_sigterm_ends_the_process_and_its_engine_at_once(
    wiring: Wiring, blend_run: tuple[subprocess.Popen[bytes], str, list[int]]
) -> None:
    process, job_id, engines = blend_run
    # Stopped, so that the first signal cannot have done all of its work before the second one comes.
    for pid in engines:
        os.kill(pid, signal.SIGSTOP)
    process.terminate()
    time.sleep(1)
    process.terminate()
    for pid in engines:
        os.kill(pid, signal.SIGCONT)

    assert process.wait(5) == -signal.SIGTERM
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines), timeout_s=5)
    assert get_job(wiring.database, job_id).status is JobStatus.IN_PROGRESS
    assert counts(wiring.database, job_id).succeeded >= 10


def test_a_job_that_nothing_runs_is_cancelled_on_the_spot(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=5))

    assert cancel_job(wiring, job_id, SilentProgress()) is JobStatus.CANCELLED


def test_an_unknown_model_fails_the_job_with_what_to_do(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=2, model="no-such-model"))

    with pytest.raises(ConfigurationError, match="blend model add"):
        run_job(wiring, job_id, SilentProgress())

    job = get_job(wiring.database, job_id)
    assert job.status is JobStatus.FAILED
    assert "blend model add" in (job.error_message or "")


def test_a_source_that_is_not_there_fails_the_job(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(s3=[wiring.objects.uri("tests/nothing/here.jsonl")]))

    with pytest.raises(SourceError, match=r"here\.jsonl"):
        run_job(wiring, job_id, SilentProgress())

    assert get_job(wiring.database, job_id).status is JobStatus.FAILED


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
