from collections.abc import Callable
from dataclasses import replace

import pytest
import sqlalchemy as sa

from blend_core.errors import RequestErrorCode, StaleRunError, StorageError
from storage.database import Database
from storage.job_sources import JobSource, load_job_sources, save_job_sources
from storage.jobs import create_job, get_job
from storage.ownership import Run
from storage.requests import RequestRow, RequestWriter
from storage.results import ResultRow, counts, iter_results, pending_seqs
from storage.runs import RunStatus, finish_run, start_run

pytestmark = pytest.mark.postgres


@pytest.fixture
def job_id(db: Database) -> str:
    return create_job(db, name="ingest", model="tiny", spec={})


def row(seq: int, **values: object) -> RequestRow:
    return replace(RequestRow(seq, "s3://in/a.jsonl", seq + 1), **values)  # type: ignore[arg-type]


def rows_of(db: Database, job_id: str) -> list[ResultRow]:
    return list(iter_results(db, job_id))


def test_good_and_bad_rows_are_there_with_their_source(db: Database, job_id: str) -> None:
    with RequestWriter(db, job_id) as writer:
        writer.add(row(0, custom_id="a", num_prompt_tokens=5, max_tokens=9))
        writer.add_error(row(1, custom_id="b"), RequestErrorCode.NO_PROMPT, "There is no prompt.")
        assert (writer.num_total, writer.num_errored) == (2, 1)
    good, bad = rows_of(db, job_id)
    assert (good.custom_id, good.status, good.num_prompt_tokens) == ("a", None, 5)
    assert (bad.custom_id, bad.status, bad.error_code, bad.source_line) == ("b", "errored", "no_prompt", 2)
    assert counts(db, job_id).pending == 1
    assert pending_seqs(db, job_id).tolist() == [0]
    assert get_job(db, job_id).ingested_at is not None


def test_more_rows_than_one_batch(db: Database, job_id: str) -> None:
    with RequestWriter(db, job_id) as writer:
        for seq in range(20_005):
            if seq % 10_001 == 10_000:
                writer.add_error(row(seq), RequestErrorCode.INVALID_JSON, "The line is no JSON.")
            else:
                writer.add(row(seq, custom_id=str(seq)))
    found = counts(db, job_id)
    assert (found.total, found.errored) == (20_005, 2)
    assert len(pending_seqs(db, job_id)) == 20_003


def test_text_that_postgres_cannot_hold_is_cleaned_and_flagged(db: Database, job_id: str) -> None:
    with RequestWriter(db, job_id) as writer:
        writer.add(row(0, custom_id="a\0", prompt_excerpt="x\ud800y", endpoint="\0"))
        writer.add(row(1, custom_id="a\udc00"))
        writer.add(row(2, custom_id="é" * 600))
        writer.add_error(row(3, prompt_excerpt="\0"), RequestErrorCode.INVALID_JSON, "bad \ud800")
    with db.connect() as connection:
        found = connection.execute(
            sa.text(
                "SELECT custom_id, prompt_excerpt, error, text_cleaned FROM request_result WHERE job_id = :id"
                " ORDER BY seq"
            ),
            {"id": job_id},
        ).fetchall()
    assert tuple(found[0]) == ("a\ufffd", "x\ufffdy", None, True)
    assert tuple(found[1]) == ("a\ufffd", None, None, True)
    assert found[2].custom_id == "é" * 256
    assert found[2].text_cleaned
    assert found[3].error == "bad \ufffd"


def test_a_row_that_the_database_refuses_becomes_an_error_row_and_takes_no_other(
    db: Database, job_id: str
) -> None:
    with RequestWriter(db, job_id) as writer:
        for seq in range(100):
            writer.add(row(seq, custom_id=str(seq)))
        writer.add(row(100, custom_id="7"))
        writer.add(row(101, custom_id="too many", max_tokens=2**70))
        writer.add(row(102, custom_id="last"))
        assert writer.num_errored == 0
    assert writer.num_errored == 2
    found = {result.seq: result for result in rows_of(db, job_id)}
    assert len(found) == 103
    assert {seq: r.error_code for seq, r in found.items() if r.status} == {
        100: "duplicate_custom_id",
        101: "invalid_value",
    }
    assert found[101].custom_id == "too many"
    assert counts(db, job_id).errored == 2


def test_an_unfinished_ingest_is_replaced_and_a_finished_one_is_not(db: Database, job_id: str) -> None:
    writer = RequestWriter(db, job_id).__enter__()
    for seq in range(12_000):
        writer.add(row(seq, custom_id=str(seq)))
    writer.__exit__(RuntimeError, RuntimeError("stop"), None)
    assert 0 < counts(db, job_id).total < 12_000
    with RequestWriter(db, job_id) as writer:
        writer.add(row(0, custom_id="0"))
    assert counts(db, job_id).total == 1
    with pytest.raises(StorageError, match="all its requests already"), RequestWriter(db, job_id):
        pass


def test_the_ingest_of_a_run_that_was_taken_over_is_refused(
    db: Database, job_id: str, take_job: Callable[[str], Run]
) -> None:
    writer = RequestWriter(db, job_id).__enter__()
    writer.add(row(0))
    take_job(job_id)
    with pytest.raises(StaleRunError):
        writer.__exit__(None, None, None)
    assert counts(db, job_id).total == 0
    assert get_job(db, job_id).ingested_at is None


@pytest.mark.parametrize("is_taken_over", [True, False], ids=["taken over", "ended"])
def test_a_run_that_no_longer_owns_the_job_makes_no_checkpoint(
    db: Database, job_id: str, is_taken_over: bool
) -> None:
    def start(lease_s: float) -> Run:
        return start_run(db, job_id, engine="none", policy="fcfs", details={}, lease_s=lease_s)

    run = start(lease_s=-1)
    save_job_sources(
        db, job_id, run, [JobSource("s3", "s3://in/a", 1, "e"), JobSource("s3", "s3://in/b", 1, "e")]
    )
    writer = RequestWriter(db, job_id, run).__enter__()
    writer.add(row(0))
    writer.source_read(0, 1)
    writer.checkpoint()
    if is_taken_over:
        start(lease_s=60)
    else:
        finish_run(db, run, RunStatus.FAILED)

    writer.add(row(1))
    writer.source_read(1, 1)
    with pytest.raises(StaleRunError):
        writer.checkpoint()

    assert [source.num_items for source in load_job_sources(db, job_id)] == [1, None]
    assert len(rows_of(db, job_id)) == counts(db, job_id).total == 1


def test_a_run_that_was_taken_over_removes_nothing_of_the_next_ones(db: Database, job_id: str) -> None:
    stale, live = (
        start_run(db, job_id, engine="none", policy="fcfs", details={}, lease_s=lease_s)
        for lease_s in (-1.0, 60.0)
    )
    with RequestWriter(db, job_id, live) as writer:
        for seq in range(10_000):  # as many as are committed together
            writer.add(row(seq))
        with pytest.raises(StaleRunError), RequestWriter(db, job_id, stale):
            pass
    assert counts(db, job_id).total == 10_000
    assert len(rows_of(db, job_id)) == 10_000
