from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from blend_core.errors import ConfigurationError, StaleRunError, StorageError
from storage.database import Database
from storage.job_outputs import set_job_outputs
from storage.job_status import JobStatus
from storage.jobs import (
    close_pending,
    create_job,
    get_job,
    job_of_key,
    list_jobs,
    request_cancel,
    set_job_status,
)
from storage.ownership import Run
from storage.results import counts
from storage.runs import RunStatus, finish_run, heartbeat, latest_run, set_run_details, start_run

pytestmark = pytest.mark.postgres


def test_the_same_idempotency_key_gives_the_same_job(db: Database) -> None:
    first = create_job(db, name="a", model="m", spec={"x": 1}, idempotency_key="night-1")
    assert create_job(db, name="b", model="m", spec={}, idempotency_key="night-1") == first
    assert create_job(db, name="a", model="m", spec={}, idempotency_key="night-2") != first
    assert get_job(db, first).spec == {"x": 1}
    assert job_of_key(db, "night-1") == first
    assert job_of_key(db, "night-3") is None
    assert job_of_key(db, "night\ud800") is None


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"idempotency_key": "night\0one"}, "idempotency key"),
        ({"model": "m\ud800"}, "model"),
        ({"spec": {"sql": [{"prompt": "a\0b"}]}}, r"spec\.sql\[0\]\.prompt"),
    ],
)
def test_a_job_that_the_database_cannot_hold_is_refused_with_the_place(
    db: Database, values: dict[str, Any], place: str
) -> None:
    before = len(list_jobs(db))
    with pytest.raises(ConfigurationError, match=f"^The job's {place} has a NUL"):
        create_job(db, **{"name": "n", "model": "m", "spec": {}, **values})
    assert len(list_jobs(db)) == before


def test_jobs_are_listed_newest_first_and_by_state(db: Database) -> None:
    older, newer = (create_job(db, name="n", model="m", spec={}) for _ in range(2))
    set_job_status(db, older, JobStatus.FAILED, error_message="No\0source.")
    assert [job.job_id for job in list_jobs(db, limit=2)] == [newer, older]
    assert list_jobs(db, status=JobStatus.FAILED)[0].error_message == "No\ufffdsource."


def test_an_unknown_job_is_named(db: Database) -> None:
    for call in (get_job, counts, request_cancel):
        with pytest.raises(StorageError, match="no job job_x"):
            call(db, "job_x")
    with pytest.raises(StorageError, match="no job job_x"):
        set_job_outputs(db, "job_x", output_uri=None, error_uri=None, table_uri=None)


def test_a_job_completes_only_when_every_request_has_a_result(
    db: Database, make_job: Callable[..., str]
) -> None:
    job_id = make_job(num_valid=2, num_bad=1)
    set_job_status(db, job_id, JobStatus.IN_PROGRESS)
    set_job_status(db, job_id, JobStatus.FINALIZING)
    with pytest.raises(StorageError, match="2 requests without a result"):
        set_job_status(db, job_id, JobStatus.COMPLETED)
    assert get_job(db, job_id).status is JobStatus.FINALIZING


@pytest.mark.parametrize("end", [JobStatus.EXPIRED, JobStatus.CANCELLED, JobStatus.FAILED])
def test_the_sum_holds_in_every_end_state(db: Database, make_job: Callable[..., str], end: JobStatus) -> None:
    job_id = make_job(num_valid=3, num_bad=2)
    job = set_job_status(db, job_id, end)
    assert job.num_total == 5
    assert job.num_errored == 2
    assert (job.num_expired, job.num_cancelled) == ((3, 0) if end is JobStatus.EXPIRED else (0, 3))
    assert job.finished_at is not None


def test_an_expired_job_can_be_exported_before_it_ends(db: Database, make_job: Callable[..., str]) -> None:
    job_id = make_job(num_valid=3)
    assert close_pending(db, job_id, JobStatus.EXPIRED) == 3
    assert close_pending(db, job_id, JobStatus.EXPIRED) == 0
    assert counts(db, job_id).pending == 0
    assert set_job_status(db, job_id, JobStatus.EXPIRED).num_expired == 3


@pytest.mark.parametrize("statement", [
    "UPDATE batch_job SET status = 'in_progress', finished_at = NULL WHERE job_id = :id",
    "UPDATE batch_job SET status = 'failed' WHERE job_id = :id",
    "UPDATE batch_job SET num_errored = num_errored + 1 WHERE job_id = :id",
    "UPDATE result SET status = 'succeeded' WHERE job_id = :id",
])  # fmt: skip
def test_the_database_itself_keeps_an_end_state(
    db: Database, make_job: Callable[..., str], statement: str
) -> None:
    job_id = make_job(num_valid=1)
    ended = set_job_status(db, job_id, JobStatus.CANCELLED)
    with pytest.raises(StorageError, match=r"stays so|never changed"), db.connect() as connection:
        connection.execute(sa.text(statement), {"id": job_id})
    assert get_job(db, job_id) == ended


def test_an_illegal_move_is_refused_and_the_same_state_changes_nothing(
    db: Database, make_job: Callable[..., str]
) -> None:
    job_id = make_job(num_valid=0)
    with pytest.raises(StorageError, match="validating and cannot become completed"):
        set_job_status(db, job_id, JobStatus.COMPLETED)
    moved = set_job_status(db, job_id, JobStatus.IN_PROGRESS)
    assert set_job_status(db, job_id, JobStatus.IN_PROGRESS) == moved


def test_cancel_asks_a_running_job_and_leaves_an_ended_one(
    db: Database, make_job: Callable[..., str]
) -> None:
    job_id = make_job(num_valid=1)
    assert request_cancel(db, job_id) is JobStatus.CANCELLING
    assert request_cancel(db, job_id) is JobStatus.CANCELLING
    set_job_status(db, job_id, JobStatus.CANCELLED)
    assert request_cancel(db, job_id) is JobStatus.CANCELLED


def test_a_live_run_keeps_a_second_one_out(
    db: Database, make_job: Callable[..., str], take_job: Callable[[str], Run]
) -> None:
    job_id = make_job()
    assert latest_run(db, job_id) is None
    first = take_job(job_id)
    with pytest.raises(StorageError, match=first.run_id) as caught:
        take_job(job_id)
    assert 0 < int(caught.value.ids["lease_left_s"]) <= 60
    finish_run(db, first, RunStatus.FAILED, error_message="out of memory\0")
    latest = latest_run(db, job_id)
    assert latest is not None
    assert (latest.run_id, latest.status) == (first.run_id, RunStatus.FAILED)
    assert (latest.error or "").startswith("out of memory")
    assert take_job(job_id).fencing_number == first.fencing_number + 1
    latest = latest_run(db, job_id)
    assert latest is not None
    assert (latest.status, latest.error) == (RunStatus.RUNNING, None)


def test_a_run_whose_lease_ended_is_taken_over_and_told(db: Database, make_job: Callable[..., str]) -> None:
    job_id = make_job()
    dead = start_run(db, job_id, engine="e", policy="p", details={}, lease_s=60)
    assert heartbeat(db, dead, lease_s=-1).status is JobStatus.VALIDATING
    start_run(db, job_id, engine="e", policy="p", details={}, lease_s=60)
    with pytest.raises(StaleRunError):
        heartbeat(db, dead, lease_s=60)
    finish_run(db, dead, RunStatus.SUCCEEDED)
    with db.connect() as connection:
        states = connection.execute(
            sa.text("SELECT status FROM run WHERE job_id = :id ORDER BY fencing_number"), {"id": job_id}
        )
        assert states.scalars().all() == ["lost", "running"]


def test_an_ended_job_takes_no_run(
    db: Database, make_job: Callable[..., str], take_job: Callable[[str], Run]
) -> None:
    job_id = make_job()
    set_job_status(db, job_id, JobStatus.CANCELLED)
    with pytest.raises(StorageError, match="ended as cancelled"):
        take_job(job_id)


def test_a_heartbeat_brings_the_wish_to_cancel(
    db: Database, make_job: Callable[..., str], take_job: Callable[[str], Run]
) -> None:
    job_id = make_job()
    run = take_job(job_id)
    request_cancel(db, job_id)
    assert heartbeat(db, run, lease_s=60).status is JobStatus.CANCELLING


@pytest.mark.parametrize(
    ("window_s", "is_overdue"), [(None, False), (3600.0, False), (0.0, True)], ids=["none", "open", "closed"]
)
def test_a_heartbeat_tells_of_a_completion_window_that_closed(
    db: Database, take_job: Callable[[str], Run], window_s: float | None, is_overdue: bool
) -> None:
    job_id = create_job(db, name="test", model="tiny", spec={}, completion_window_s=window_s)
    assert heartbeat(db, take_job(job_id), lease_s=60).is_overdue is is_overdue


def test_details_are_added_to_those_that_are_there(
    db: Database, make_job: Callable[..., str], take_job: Callable[[str], Run]
) -> None:
    run = take_job(make_job())
    set_run_details(db, run, {"a": "1"})
    set_run_details(db, run, {"b": "2"})
    with db.connect() as connection:
        query = sa.text("SELECT details FROM run_summary WHERE run_id = :id")
        assert connection.execute(query, {"id": run.run_id}).scalar_one() == {"a": "1", "b": "2"}
