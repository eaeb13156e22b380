"""Two ranks share a job: every request once, whatever becomes of an engine."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from blend_core.errors import EngineDiedError
from flows.progress import SilentProgress
from flows.running import create_job, run_job
from flows.settings import Settings
from flows.wiring import Endpoints, Wiring
from storage.job_status import JobStatus
from storage.jobs import get_job, request_cancel
from storage.results import counts, iter_results
from storage.suspects import engine_deaths
from tests.e2e.conftest import ENGINE
from tests.e2e.watched_run import assert_sums_hold, engine_pids

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]


@pytest.fixture
def ranks_wiring(endpoints: Endpoints, tmp_path: Path) -> Iterator[Wiring]:
    """Few requests at a time, so that a small job is cut into many shards."""
    engine = ENGINE.model_copy(update={"max_num_seqs": 4})
    parts = Wiring.from_settings(Settings(home=tmp_path / "home", engine=engine), endpoints)
    parts.database.upgrade()
    parts.objects.ensure_bucket()
    yield parts
    parts.close()


class WatchingRanks(SilentProgress):
    """Does something once, when both ranks have closed a window."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.notes: list[str] = []
        self._ranks: set[int] = set()
        self._action: Callable[[], object] | None = action

    def window(self, window: Any, rank: int) -> None:
        self._ranks.add(rank)
        if self._ranks == {0, 1} and self._action is not None:
            action, self._action = self._action, None
            action()

    def note(self, message: str) -> None:
        self.notes.append(message)


def kill_one_engine() -> None:
    os.kill(engine_pids()[0], signal.SIGKILL)


def rows(wiring: Wiring, query: str, job_id: str) -> list[Any]:
    with wiring.database.connect() as connection:
        return list(connection.execute(sa.text(query), {"job_id": job_id}))


def assert_shards_add_up(wiring: Wiring, job_id: str, num_requests: int) -> None:
    """Every request ended in one shard."""
    found = rows(
        wiring,
        "SELECT sum(num_requests), sum(num_ended), bool_and(status = 'done') FROM shard"
        " WHERE job_id = :job_id",
        job_id,
    )
    assert [tuple(row) for row in found] == [(num_requests, num_requests, True)]


def test_both_ranks_work_and_every_request_is_answered_once(ranks_wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(
        ranks_wiring, make_job(num_chats=160, num_rows=60, max_tokens=30, options={"ranks": 2})
    )

    outcome = run_job(ranks_wiring, job_id, SilentProgress())

    assert (outcome.status, outcome.succeeded) == ("completed", 220)
    assert_sums_hold(ranks_wiring, job_id, 220)
    assert_shards_add_up(ranks_wiring, job_id, 220)
    windows = rows(
        ranks_wiring,
        "SELECT rank, count(*), sum(num_finished), max(batch_index) + 1 FROM batch_metric"
        " WHERE job_id = :job_id GROUP BY rank ORDER BY rank",
        job_id,
    )
    assert [row[0] for row in windows] == [0, 1]
    assert all(row[1] == row[3] for row in windows)
    # No request was computed twice.
    assert sum(row[2] for row in windows) == 220
    assert min(row[2] for row in windows) >= 40
    assert engine_pids() == []


def test_the_engine_of_one_rank_is_killed_and_everything_is_answered_once(
    ranks_wiring: Wiring, make_job: Any
) -> None:
    job_id = create_job(ranks_wiring, make_job(num_chats=160, max_tokens=60, options={"ranks": 2}))
    watching = WatchingRanks(kill_one_engine)

    outcome = run_job(ranks_wiring, job_id, watching)

    assert (outcome.status, outcome.succeeded) == ("completed", 160)
    (death,) = engine_deaths(ranks_wiring.database, job_id)
    assert death.reason.startswith(("Rank 0: ", "Rank 1: "))
    assert any("SIGKILL" in note and note.startswith(death.reason) for note in watching.notes)
    assert len({row.seq for row in iter_results(ranks_wiring.database, job_id)}) == 160
    assert_sums_hold(ranks_wiring, job_id, 160)
    assert_shards_add_up(ranks_wiring, job_id, 160)


def test_what_a_rank_held_that_is_given_up_goes_to_the_other(ranks_wiring: Wiring, make_job: Any) -> None:
    settings = ranks_wiring.settings
    settings.engine = settings.engine.model_copy(update={"max_restarts": 0})
    job_id = create_job(ranks_wiring, make_job(num_chats=160, max_tokens=60, options={"ranks": 2}))
    watching = WatchingRanks(kill_one_engine)

    outcome = run_job(ranks_wiring, job_id, watching)

    assert (outcome.status, outcome.succeeded) == ("completed", 160)
    assert any("given up and the others go on" in note for note in watching.notes)
    assert_sums_hold(ranks_wiring, job_id, 160)
    assert_shards_add_up(ranks_wiring, job_id, 160)


def test_the_last_rank_that_is_given_up_ends_the_run_and_the_next_run_continues(
    ranks_wiring: Wiring, make_job: Any
) -> None:
    settings = ranks_wiring.settings
    settings.engine = settings.engine.model_copy(update={"max_restarts": 0})
    job_id = create_job(ranks_wiring, make_job(num_chats=160, max_tokens=60, options={"ranks": 2}))

    def kill_all() -> None:
        for pid in engine_pids():
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(EngineDiedError):
        run_job(ranks_wiring, job_id, WatchingRanks(kill_all))
    assert get_job(ranks_wiring.database, job_id).status is JobStatus.IN_PROGRESS
    outcome = run_job(ranks_wiring, job_id, SilentProgress())

    assert (outcome.status, outcome.succeeded) == ("completed", 160)
    assert_sums_hold(ranks_wiring, job_id, 160)


def test_a_slow_rank_loses_what_it_has_not_started(ranks_wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(ranks_wiring, make_job(num_chats=120, max_tokens=40, options={"ranks": 2}))
    stopped: list[int] = []

    def stop_one() -> None:
        stopped.append(engine_pids()[0])
        os.kill(stopped[0], signal.SIGSTOP)

    class Waking(WatchingRanks):
        """Lets the engine that was stopped go on when the other one has little left to do."""

        def counted(self, num_done: int, num_total: int | None) -> None:
            if stopped and num_done >= 110:
                os.kill(stopped.pop(), signal.SIGCONT)

    outcome = run_job(ranks_wiring, job_id, Waking(stop_one))

    assert (outcome.status, outcome.succeeded) == ("completed", 120)
    assert stopped == []
    assert_sums_hold(ranks_wiring, job_id, 120)
    assert_shards_add_up(ranks_wiring, job_id, 120)


def test_a_cancelled_job_stops_both_ranks(ranks_wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(ranks_wiring, make_job(num_chats=400, max_tokens=200, options={"ranks": 2}))

    outcome = run_job(
        ranks_wiring, job_id, WatchingRanks(lambda: request_cancel(ranks_wiring.database, job_id))
    )

    assert outcome.status == "cancelled"
    assert outcome.succeeded + outcome.cancelled == 400
    assert counts(ranks_wiring.database, job_id).pending == 0
    assert engine_pids() == []
