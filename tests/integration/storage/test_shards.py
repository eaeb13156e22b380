"""Leases of shards: who holds one writes its results, and nobody else."""

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from blend_core.engines.base import RequestFinished
from blend_core.errors import StaleRunError, StorageError
from storage.database import Database
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.recorder import Recorder
from storage.results import counts, iter_results, pending_seqs
from storage.shards import (
    Lease,
    NewShard,
    deal_shards,
    extend_leases,
    forget_shards,
    release_expired,
    release_rank,
)

pytestmark = [pytest.mark.postgres, pytest.mark.s3]

Answer = Callable[..., RequestFinished]


@pytest.fixture
def run(make_job: Callable[..., str], take_job: Callable[[str], Run]) -> Run:
    """A run of a job of ten requests."""
    return take_job(make_job(num_valid=10))


def deal(db: Database, run: Run, *new: NewShard, lease_s: float = 60, **changes: Any) -> list[Lease]:
    return deal_shards(db, run, 0, new, lease_s=lease_s, **changes)


def shards(db: Database, run: Run) -> list[tuple[Any, ...]]:
    """(index, status, rank, fencing number, requests, ended) of each."""
    query = sa.text(
        "SELECT shard_index, status, rank, fencing_number, num_requests, num_ended FROM shard"
        " WHERE run_id = :run_id ORDER BY revision, shard_index"
    )
    with db.connect() as connection:
        return [tuple(row) for row in connection.execute(query, {"run_id": run.run_id})]


def record(db: Database, objects: ObjectStore, run: Run, *given: tuple[RequestFinished, Lease]) -> None:
    with Recorder(db, objects, run) as recorder:
        for event, lease in given:
            recorder.finished(event, lease)


def test_a_shard_is_done_with_its_last_result(
    db: Database, objects: ObjectStore, run: Run, answer: Answer
) -> None:
    first, second = deal(db, run, NewShard(0, 2, 1.5), NewShard(1, 8, 1.5))

    record(db, objects, run, (answer(0), first), (answer(2), second), (answer(0), first))
    assert shards(db, run) == [(0, "leased", 0, 1, 2, 1), (1, "leased", 1, 1, 8, 1)]
    record(db, objects, run, (answer(1), first))

    assert shards(db, run) == [(0, "done", 0, 1, 2, 2), (1, "leased", 1, 1, 8, 1)]
    assert counts(db, run.job_id).succeeded == 3


def test_what_is_given_again_after_its_shard_is_done_is_not_called_late(
    db: Database, objects: ObjectStore, run: Run, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    (lease,) = deal(db, run, NewShard(0, 1, 1.0))
    record(db, objects, run, (answer(0), lease))
    record(db, objects, run, (answer(0), lease))

    assert shards(db, run) == [(0, "done", 0, 1, 1, 1)]
    assert counts(db, run.job_id).succeeded == 1
    assert not caplog.records


def test_a_late_result_does_not_hide_that_of_who_holds_the_request_now(
    db: Database, objects: ObjectStore, run: Run, answer: Answer
) -> None:
    (dead, _) = deal(db, run, NewShard(0, 4, 1.0), NewShard(1, 6, 1.0))
    (waiting,) = release_rank(db, run, 0)
    (taken,) = deal(db, run, NewShard(1, 4, 1.0), shrunk=[(waiting, 4)])

    record(db, objects, run, (answer(0, "late"), dead), (answer(0, "held"), taken))

    assert next(iter_results(db, run.job_id)).output_text == "held"


def test_late_results_of_a_rank_that_was_given_up_are_refused(
    db: Database, objects: ObjectStore, run: Run, answer: Answer
) -> None:
    (dead, _) = deal(db, run, NewShard(0, 4, 1.0), NewShard(1, 6, 1.0))
    record(db, objects, run, (answer(0), dead))
    (waiting,) = release_rank(db, run, 0)
    assert (waiting.shard_index, waiting.fencing_number) == (0, 2)

    record(db, objects, run, (answer(1), dead))
    (taken,) = deal(db, run, NewShard(1, 3, 0.7), shrunk=[(waiting, 3)])
    record(db, objects, run, (answer(1, "late"), dead), (answer(2), taken))

    assert pending_seqs(db, run.job_id).tolist() == [1, 3, 4, 5, 6, 7, 8, 9]
    assert shards(db, run) == [(0, "done", 0, 2, 1, 1), (1, "leased", 1, 1, 6, 0), (2, "leased", 1, 1, 3, 1)]


def test_late_results_of_a_lease_that_ran_out_are_refused_once_it_is_taken(
    db: Database, objects: ObjectStore, run: Run, answer: Answer
) -> None:
    (slow,) = deal(db, run, NewShard(0, 4, 1.0), lease_s=-1)
    (live,) = deal(db, run, NewShard(1, 6, 1.0))

    assert [lease.shard_index for lease in release_expired(db, run)] == [slow.shard_index]
    assert release_expired(db, run) == []
    record(db, objects, run, (answer(0), slow), (answer(4), live))

    assert pending_seqs(db, run.job_id).tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_a_heartbeat_keeps_what_live_ranks_hold(db: Database, run: Run) -> None:
    deal(db, run, NewShard(0, 4, 1.0), NewShard(1, 6, 1.0), lease_s=-1)

    extend_leases(db, run, [1], lease_s=60)

    assert [lease.rank for lease in release_expired(db, run)] == [0]


def test_an_idle_rank_takes_what_has_not_started(
    db: Database, objects: ObjectStore, run: Run, answer: Answer
) -> None:
    behind, _ = deal(db, run, NewShard(0, 6, 1.0), NewShard(1, 4, 1.0))

    (taken,) = deal(db, run, NewShard(1, 4, 0.6), shrunk=[(behind, 4)])
    record(db, objects, run, (answer(0), behind), (answer(1), behind), (answer(2), taken))

    assert shards(db, run) == [(0, "done", 0, 1, 2, 2), (1, "leased", 1, 1, 4, 0), (2, "leased", 1, 1, 4, 1)]


def test_a_shard_that_is_taken_whole_is_gone_and_one_that_changed_hands_is_not_taken(
    db: Database, run: Run
) -> None:
    (first,) = deal(db, run, NewShard(0, 10, 1.0))
    (second,) = deal(db, run, NewShard(1, 10, 1.0), shrunk=[(first, 10)])
    release_rank(db, run, 1)

    with pytest.raises(StorageError, match="not held as it was"):
        deal(db, run, NewShard(0, 5, 0.5), shrunk=[(second, 5)])

    assert shards(db, run) == [(1, "waiting", 1, 2, 10, 0)]


@pytest.mark.parametrize(
    "write",
    [
        lambda db, run, lease: deal(db, run, NewShard(0, 1, 1.0)),
        lambda db, run, lease: extend_leases(db, run, [0], lease_s=60),
        lambda db, run, lease: release_rank(db, run, 0),
        lambda db, run, lease: release_expired(db, run),
        lambda db, run, lease: forget_shards(db, run),
    ],
    ids=["deal", "extend", "release", "expire", "forget"],
)
def test_a_stale_run_leases_nothing(
    db: Database, run: Run, take_job: Callable[[str], Run], write: Callable[..., Any]
) -> None:
    (lease,) = deal(db, run, NewShard(0, 10, 1.0))
    with db.connect() as connection:
        connection.execute(
            sa.text("UPDATE run SET lease_expires_at = clock_timestamp() WHERE run_id = :run_id"),
            {"run_id": run.run_id},
        )
    newer = take_job(run.job_id)
    before = shards(db, run)

    with pytest.raises(StaleRunError):
        write(db, run, lease)

    assert shards(db, run) == before
    forget_shards(db, newer)
    assert shards(db, run) == []


def test_the_database_refuses_shards_of_a_run_that_does_not_own_the_job_and_changes_of_done_ones(
    db: Database, objects: ObjectStore, run: Run, answer: Answer, make_job: Callable[..., str]
) -> None:
    (lease,) = deal(db, run, NewShard(0, 1, 1.0))
    record(db, objects, run, (answer(0), lease))

    with pytest.raises(StorageError, match="done and stays so"), db.raw() as connection:
        connection.execute("UPDATE shard SET num_requests = 5 WHERE run_id = %s", (run.run_id,))
    with pytest.raises(StorageError, match="does not own"), db.raw() as connection:
        connection.execute(
            "INSERT INTO shard (job_id, run_id, revision, shard_index, status, rank, num_requests,"
            " estimated_work_s) VALUES (%s, %s, 0, 9, 'leased', 0, 1, 1)",
            (make_job(), run.run_id),
        )
