import threading
import time
from collections.abc import Callable
from dataclasses import replace

import psycopg
import pytest
import sqlalchemy as sa

from blend_core.engines.base import RequestFailed, RequestFinished, StepWindow
from blend_core.errors import StaleRunError, StorageUnavailableError
from storage.database import Database
from storage.job_status import JobStatus
from storage.jobs import set_job_status
from storage.object_client import ObjectStoreOptions
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.recorder import Recorder
from storage.results import counts, densities, iter_results, job_metrics, pending_seqs
from storage.runs import RunStatus, finish_run

pytestmark = [pytest.mark.postgres, pytest.mark.s3]

Answer = Callable[..., RequestFinished]


@pytest.fixture
def run(make_job: Callable[..., str], take_job: Callable[[str], Run]) -> Run:
    """A run of a job of ten requests."""
    return take_job(make_job(num_valid=10))


def test_answers_and_failures_are_committed_while_the_run_goes_on(
    db: Database, objects: ObjectStore, run: Run, answer: Answer, failure: Callable[[int], RequestFailed]
) -> None:
    with Recorder(db, objects, run) as recorder:
        recorder.finished(answer(3))
        recorder.failed(failure(5))
        deadline_s = time.monotonic() + 30
        while counts(db, run.job_id).pending > 8:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
    rows = {row.seq: row for row in iter_results(db, run.job_id)}
    assert (rows[3].status, rows[3].output_text, rows[3].num_output_tokens) == ("succeeded", "Paris.", 3)
    assert rows[3].started_at is not None
    assert rows[3].started_at.timestamp() == 1_700_000_000.25
    assert (rows[5].status, rows[5].error_code) == ("errored", "timed_out")
    assert pending_seqs(db, run.job_id).tolist() == [0, 1, 2, 4, 6, 7, 8, 9]


def test_the_first_answer_wins_and_is_counted_once(
    db: Database, objects: ObjectStore, run: Run, answer: Answer
) -> None:
    with Recorder(db, objects, run) as recorder:
        recorder.finished(answer(0, "first"))
        recorder.finished(answer(0, "second of the same flush"))
        recorder.flush()
        recorder.finished(answer(0, "third"))
    assert next(iter_results(db, run.job_id)).output_text == "first"
    assert counts(db, run.job_id).succeeded == 1


def test_a_refused_row_takes_no_other_with_it(
    db: Database, objects: ObjectStore, run: Run, answer: Answer, make_window: Callable[..., StepWindow]
) -> None:
    with Recorder(db, objects, run) as recorder:
        for seq in range(10):
            recorder.finished(
                answer(seq, "a\0b\ud800" if seq == 2 else "x", float("nan") if seq == 4 else 2.0)
            )
        recorder.window(make_window(0), rank=0, planned_density=0.4)
        recorder.window(make_window(1), rank=2**80, planned_density=0.4)
    rows = list(iter_results(db, run.job_id))
    assert [row.status for row in rows] == ["succeeded"] * 4 + ["errored"] + ["succeeded"] * 5
    assert rows[2].output_text == "a\ufffdb\ufffd"
    assert rows[4].error_code == "engine_failed"
    assert (counts(db, run.job_id).succeeded, counts(db, run.job_id).errored) == (9, 1)
    assert len(densities(db, run.run_id)) == 1


def test_windows_have_planned_and_measured_density(
    db: Database, objects: ObjectStore, run: Run, answer: Answer, make_window: Callable[..., StepWindow]
) -> None:
    with Recorder(db, objects, run) as recorder:
        recorder.finished(answer(0))
        recorder.window(make_window(0), rank=0, planned_density=0.4)
        recorder.window(make_window(1, memory_s=0.0), rank=0, planned_density=None)
    first, second = densities(db, run.run_id)
    assert (first.planned_density, first.measured_density, first.num_steps) == (0.4, 0.5, 64)
    assert (second.planned_density, second.measured_density) == (None, None)
    metrics = job_metrics(db, run.job_id)
    assert (metrics.num_batches, metrics.busy_s, metrics.prefix_sharing) == (2, 2.0, 0.4)
    with db.connect() as connection:
        query = sa.text("SELECT busy_s, measured_density, tokens_per_s FROM run_summary WHERE run_id = :id")
        assert tuple(connection.execute(query, {"id": run.run_id}).one()) == (2.0, 1.0, metrics.tokens_per_s)


def test_a_window_that_is_told_again_is_stored_once_whichever_rank_is_ahead(
    db: Database, objects: ObjectStore, run: Run, make_window: Callable[..., StepWindow]
) -> None:
    told = [(0, 7), (1, 2), (0, 8)]
    for more in ([], [(1, 3), (2, 0)]):
        with Recorder(db, objects, run) as recorder:
            for rank, number in [*told, *more]:
                recorder.window(make_window(number), rank=rank, planned_density=None)
    stored = [(row.rank, row.batch_index) for row in densities(db, run.run_id)]
    assert sorted(stored) == sorted([*told, (1, 3), (2, 0)])


def test_an_answer_too_large_for_a_row_goes_to_the_object_store(
    db: Database, objects: ObjectStore, run: Run, answer: Answer
) -> None:
    text = "漢" * 400_000
    with Recorder(db, objects, run) as recorder:
        recorder.finished(answer(0, text))
    assert next(iter_results(db, run.job_id, objects=objects)).output_text == text
    excerpt = next(iter_results(db, run.job_id)).output_text
    assert excerpt is not None
    assert len(excerpt) == 1_000


def test_a_run_that_was_taken_over_writes_nothing_more(
    db: Database, objects: ObjectStore, run: Run, answer: Answer, take_job: Callable[[str], Run]
) -> None:
    recorder = Recorder(db, objects, run, flush_interval_s=0.01)
    recorder.finished(answer(0))
    recorder.flush()
    finish_run(db, run, RunStatus.FAILED)
    take_job(run.job_id)
    recorder.finished(answer(1))
    with pytest.raises(StaleRunError):
        recorder.close()
    assert counts(db, run.job_id).succeeded == 1
    recorder.close()


def test_an_ended_job_takes_no_late_answer(
    db: Database, objects: ObjectStore, run: Run, answer: Answer
) -> None:
    set_job_status(db, run.job_id, JobStatus.CANCELLED, run=run)
    with pytest.raises(StaleRunError), Recorder(db, objects, run) as recorder:
        recorder.finished(answer(0))
    assert counts(db, run.job_id).cancelled == 10


def test_a_lost_connection_loses_no_answer(
    db: Database, postgres_url: str, objects: ObjectStore, run: Run, answer: Answer
) -> None:
    with Recorder(db, objects, run, flush_interval_s=0.01) as recorder:
        for seq in range(10):
            recorder.finished(answer(seq))
            recorder.flush()
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
    assert counts(db, run.job_id).succeeded == 10


class AwayDatabase(Database):
    """A database that does not answer until it is told to."""

    is_away = True

    def open_raw(self) -> psycopg.Connection:
        if self.is_away:
            raise StorageUnavailableError("away")
        return super().open_raw()


@pytest.mark.parametrize("bound", ["rows", "tokens"])
def test_while_the_database_is_away_calls_block_and_nothing_is_lost(
    db: Database, objects: ObjectStore, run: Run, answer: Answer, bound: str
) -> None:
    away = AwayDatabase(db.url)
    tokens_of_four = 4 * answer(0).num_output_tokens
    recorder = (
        Recorder(away, objects, run, max_waiting_rows=4)
        if bound == "rows"
        else Recorder(away, objects, run, max_waiting_tokens=tokens_of_four)
    )
    given: list[int] = []

    def give() -> None:
        for seq in range(10):
            recorder.finished(answer(seq))
            given.append(seq)

    thread = threading.Thread(target=give)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    assert len(given) <= 4
    away.is_away = False
    thread.join(20)
    recorder.close()
    assert counts(db, run.job_id).succeeded == 10


def test_a_database_that_stays_away_is_given_up(
    db: Database, objects: ObjectStore, run: Run, answer: Answer
) -> None:
    recorder = Recorder(AwayDatabase(db.url), objects, run, flush_interval_s=0.01, give_up_after_s=0.2)
    recorder.finished(answer(0))
    with pytest.raises(StorageUnavailableError, match="run job"):
        recorder.close()


def test_an_object_store_that_stays_away_is_named(
    db: Database, object_store_options: ObjectStoreOptions, closed_port: int, run: Run, answer: Answer
) -> None:
    away = ObjectStore(replace(object_store_options, endpoint_url=f"http://127.0.0.1:{closed_port}"))
    recorder = Recorder(db, away, run, flush_interval_s=0.01, give_up_after_s=0)
    recorder.finished(answer(0, "too large for a row" * 100_000))
    with pytest.raises(StorageUnavailableError, match="The object store did not answer"):
        recorder.close()


def test_the_benchmark_cleans_up(db: Database, objects: ObjectStore) -> None:
    from flows.bench.record import run_record_bench

    assert run_record_bench(db, objects, 1_000) > 0
    with db.connect() as connection:
        query = sa.text("SELECT count(*) FROM batch_job WHERE name = 'bench record'")
        assert connection.execute(query).scalar_one() == 0
