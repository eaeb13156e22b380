"""A run whose job is taken over while it works writes nothing more, and the other one completes the job."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from blend_core.errors import StaleRunError
from flows.job_outcome import JobOutcome
from flows.progress import SilentProgress
from flows.running import create_job, run_job
from flows.wiring import Wiring
from storage.results import counts, iter_results
from storage.runs import latest_run_id
from tests.e2e.watched_run import Watching, assert_sums_hold, engine_pids, wait_for

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]

TABLES = ("result", "batch_metric", "plan", "engine_suspect")


def written_by(wiring: Wiring, run_id: str) -> dict[str, list[Any]]:
    """Every row that a run wrote, and its own one."""
    rows: dict[str, list[Any]] = {}
    with wiring.database.connect() as connection:
        for table in ("run", *TABLES):
            columns = {column["name"] for column in sa.inspect(connection).get_columns(table)}
            if "run_id" in columns:
                query = sa.text(f"SELECT to_jsonb(t) FROM {table} t WHERE run_id = :run_id ORDER BY 1")
                rows[table] = list(connection.execute(query, {"run_id": run_id}).scalars())
    return rows


class Successor:
    """Another run of the same job, which takes the job from the one that works on it."""

    def __init__(self, wiring: Wiring, job_id: str) -> None:
        self.outcome: JobOutcome | None = None
        self.engines: list[int] = []
        self.taken_at_s = 0.0
        self.first_run_id = ""
        self.written: dict[str, list[Any]] = {}
        self._wiring = wiring
        self._job_id = job_id
        self._thread = threading.Thread(target=self._run, daemon=True)

    def take(self) -> None:
        """Ends the lease of the run in progress until this one has the job."""
        database, job_id = self._wiring.database, self._job_id
        wait_for(lambda: counts(database, job_id).succeeded, timeout_s=20)
        self.engines = engine_pids()
        self.first_run_id = latest_run_id(database, job_id) or ""
        self._thread.start()
        while latest_run_id(database, job_id) == self.first_run_id:
            with database.connect() as connection:
                connection.execute(
                    sa.text(
                        "UPDATE run SET lease_expires_at = now() WHERE run_id = :id AND status = 'running'"
                    ),
                    {"id": self.first_run_id},
                )
            time.sleep(0.05)
        self.taken_at_s = time.monotonic()
        self.written = written_by(self._wiring, self.first_run_id)

    def take_from_silence(self) -> None:
        """The same when the engine has been stopped, and what it had told is read and committed."""

        def silence() -> None:
            for pid in engine_pids():
                os.kill(pid, signal.SIGSTOP)
            time.sleep(2.0)
            self.take()

        threading.Thread(target=silence, daemon=True).start()

    def join(self) -> None:
        self._thread.join(120)

    def _run(self) -> None:
        self.outcome = run_job(self._wiring, self._job_id, SilentProgress())


# An engine that says nothing makes no write that could be refused: only the lease tells that the job is lost.
@pytest.mark.parametrize("take", [Successor.take, Successor.take_from_silence])
def test_a_run_that_is_taken_over_ends_and_the_other_completes_the_job(
    wiring: Wiring, make_job: Any, take: Callable[[Successor], None]
) -> None:
    # Far above the limit below, far below the end of patience with a test.
    wiring.settings.engine = wiring.settings.engine.model_copy(update={"stall_limit_s": 20.0})
    job_id = create_job(wiring, make_job(num_chats=60, max_tokens=60))
    successor = Successor(wiring, job_id)

    try:
        with pytest.raises(StaleRunError):
            run_job(wiring, job_id, Watching(4, lambda: take(successor)))

        # 5 s are promised; the machine of a test may be slow, and the patience with silence is 20 s.
        assert time.monotonic() - successor.taken_at_s < 15
        assert successor.engines
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in successor.engines), timeout_s=5)
        assert written_by(wiring, successor.first_run_id) == successor.written
        assert successor.written["run"][0]["status"] == "lost"
    finally:
        successor.join()

    assert successor.outcome is not None
    assert (successor.outcome.status, successor.outcome.succeeded) == ("completed", 60)
    # The second run brought it to its end, and not the first one before it.
    assert latest_run_id(wiring.database, job_id) != successor.first_run_id
    runs = {row.run_id for row in iter_results(wiring.database, job_id)}
    assert len(runs) == 2
    assert successor.first_run_id in runs
    assert len({row.seq for row in iter_results(wiring.database, job_id)}) == 60
    assert_sums_hold(wiring, job_id, 60)
