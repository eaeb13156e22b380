"""Jobs that are cancelled, by request, Ctrl-C or signal: what had finished is kept and the sums hold."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.progress import SilentProgress
from flows.running import cancel_job, create_job, run_job, run_stages
from flows.stopping import StopReason, StopSignal
from flows.wiring import Wiring
from storage.job_status import JobStatus
from storage.jobs import get_job, request_cancel
from storage.results import counts
from tests.e2e.watched_run import Watching, assert_sums_hold, engine_pids, wait_for

SIGNALLED_AT_EXIT = """
import atexit, os
atexit.register(os.kill, os.getpid(), {number})
from flows.cli import main
main()
"""

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]


def test_a_cancelled_job_keeps_and_exports_what_had_finished(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=600, bad_lines=(b"{",), max_tokens=200))

    outcome = run_job(wiring, job_id, Watching(20, lambda: request_cancel(wiring.database, job_id)))

    assert outcome.status == "cancelled"
    assert outcome.succeeded >= 19
    assert outcome.cancelled >= 1
    assert outcome.output_uris
    assert_sums_hold(wiring, job_id, 601)


def test_a_job_whose_long_answers_are_gone_is_cancelled_with_their_beginnings(
    wiring: Wiring, make_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.result_rows._MAX_TEXT_BYTES", 4)
    job_id = create_job(wiring, make_job(num_chats=600, max_tokens=200))

    def lose_answers_and_cancel() -> None:
        wiring.objects.delete(wiring.objects.keys(f"jobs/{job_id}/answers/"))
        request_cancel(wiring.database, job_id)

    watching = Watching(20, lose_answers_and_cancel)
    outcome = run_job(wiring, job_id, watching)

    assert outcome.status == "cancelled"
    assert any("long answers were exported with their beginning alone" in note for note in watching.notes)
    (uri,) = outcome.output_uris
    (content,) = (
        wiring.objects.get(key) for key in wiring.objects.keys(f"jobs/{job_id}/outputs/") if uri.endswith(key)
    )
    assert b"The rest of this answer is gone" in content
    assert_sums_hold(wiring, job_id, 600)


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


def test_a_job_that_nothing_runs_is_cancelled_on_the_spot(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=5))

    assert cancel_job(wiring, job_id, SilentProgress()) is JobStatus.CANCELLED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_outcome_changes_no_exit_status(
    wiring: Wiring, environment: dict[str, str], make_job: Any, number: signal.Signals
) -> None:
    job_id = create_job(wiring, make_job(bad_lines=(b"{",)))
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            SIGNALLED_AT_EXIT.format(number=int(number)),
            "run",
            "--job-id",
            job_id,
            "--json",
        ],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        timeout=300,
    )

    assert json.loads(done.stdout)["status"] == "completed"
    assert done.returncode == 0


@pytest.fixture
def blend_run(
    wiring: Wiring, environment: dict[str, str], make_job: Any, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[bytes], str, list[int]]]:
    """`blend run --on-sigterm cancel` of a long job that has its first answers: process, job, engines."""
    job_id = create_job(wiring, make_job(num_chats=600, max_tokens=200))
    command = [sys.executable, "-c", "from flows.cli import main; main()", "run", "--job-id", job_id]
    with (tmp_path / "out").open("wb") as out, (tmp_path / "notes").open("wb") as notes:
        process = subprocess.Popen(
            [*command, "--on-sigterm", "cancel", "--json"],
            stdout=out,
            stderr=notes,
            env={**os.environ, **environment},
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
    assert f"Cancelling job {job_id}: what has finished is exported" in (tmp_path / "notes").read_text()
    outcome = json.loads((tmp_path / "out").read_text())
    assert outcome["status"] == "cancelled"
    assert outcome["succeeded"] >= 10
    assert outcome["output_uris"]
    assert engines
    assert not any(Path(f"/proc/{pid}").exists() for pid in engines)
    assert_sums_hold(wiring, job_id, 600)


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for a signal: it is given up when the first one came."""
    (caught,) = (
        line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line
    )
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_a_second_sigterm_ends_the_process_and_its_engine_at_once(
    wiring: Wiring, blend_run: tuple[subprocess.Popen[bytes], str, list[int]]
) -> None:
    process, job_id, engines = blend_run
    # Stopped, so that the first signal cannot have done all of its work before the second one comes.
    for pid in engines:
        os.kill(pid, signal.SIGSTOP)
    process.terminate()
    wait_for(lambda: not handles(process.pid, signal.SIGTERM), timeout_s=10)
    process.terminate()
    for pid in engines:
        os.kill(pid, signal.SIGCONT)

    assert process.wait(5) == -signal.SIGTERM
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines), timeout_s=5)
    assert get_job(wiring.database, job_id).status is JobStatus.IN_PROGRESS
    assert counts(wiring.database, job_id).succeeded >= 10
