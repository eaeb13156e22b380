"""Every kind of write of a run is refused once another run owns the job, or the job has ended."""

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from blend_core.engines.base import RequestFinished, StepWindow
from blend_core.errors import RequestErrorCode, StaleRunError, StorageError
from storage.database import Database
from storage.exporting import export_job
from storage.job_outputs import set_job_outputs, set_job_write_back
from storage.job_sources import JobSource, save_job_sources
from storage.job_status import JobStatus
from storage.jobs import close_pending, get_job, set_job_status
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.plans import next_revision, save_plan
from storage.recorder import Recorder
from storage.requests import RequestRow, RequestWriter
from storage.results import counts
from storage.runs import RunStatus, finish_run, heartbeat, set_run_details, start_run
from storage.suspects import engine_deaths, pending_suspects, record_engine_death
from tests.integration.storage.plans import plan_of

pytestmark = [pytest.mark.postgres, pytest.mark.s3]

ANSWER = RequestFinished(0, 0, "Paris.", (1, 2, 3), "stop", 10, 4, 1_700_000_000.25, 1_700_000_001.5)
WINDOW = StepWindow(
    0, 0, 1.7e9, 1.0, 0.9, 64, 1000, 500, 200, 7, 10_000, 20_000, 0.25, 0.5, 0.75, 3.5, 4.5, 1, 9
)  # fmt: skip

MakeJob = Callable[..., str]
TakeJob = Callable[[str], Run]


def record(db: Database, objects: ObjectStore, run: Run) -> None:
    with Recorder(db, objects, run) as recorder:
        recorder.finished(ANSWER)


def record_window(db: Database, objects: ObjectStore, run: Run) -> None:
    with Recorder(db, objects, run) as recorder:
        recorder.window(WINDOW, rank=0, planned_density=None)


def add_request(db: Database, objects: ObjectStore, run: Run) -> None:
    with RequestWriter(db, run.job_id, run) as writer:
        writer.add_error(RequestRow(0, "s3://b/k", 1), RequestErrorCode.INVALID_JSON, "No JSON.")


Write = Callable[[Database, ObjectStore, Run], Any]

WRITES: dict[str, Write] = {
    "result": record,
    "batch metrics": record_window,
    "requests": add_request,
    "plan": lambda db, objects, run: save_plan(db, objects, run.job_id, plan_of(0), run=run),
    "job status": lambda db, objects, run: set_job_status(db, run.job_id, JobStatus.IN_PROGRESS, run=run),
    "end of the job": lambda db, objects, run: set_job_status(db, run.job_id, JobStatus.CANCELLED, run=run),
    "failure": lambda db, objects, run: set_job_status(
        db, run.job_id, JobStatus.FAILED, run=run, error_message="late"
    ),
    "expiry of the rest": lambda db, objects, run: close_pending(db, run.job_id, JobStatus.EXPIRED, run=run),
    "sources": lambda db, objects, run: save_job_sources(
        db, run.job_id, run, [JobSource("s3", "s3://late/k")]
    ),
    "output URIs": lambda db, objects, run: set_job_outputs(
        db, run.job_id, output_uri="s3://late", error_uri=None, table_uri=None, run=run
    ),
    "outcome of writing back": lambda db, objects, run: set_job_write_back(
        db, run.job_id, {"error": "late"}, run
    ),
    "run details": lambda db, objects, run: set_run_details(db, run, {"late": "yes"}),
    "lease": lambda db, objects, run: heartbeat(db, run, lease_s=60),
    "engine death": lambda db, objects, run: record_engine_death(
        db, run, "It died.", [0], others_answered=False
    ),
}


TABLES = (
    "batch_job", "job_source", "run", "plan", "request", "result", "batch_metric", "engine_suspect",
)  # fmt: skip


def everything(db: Database, job_id: str) -> tuple[Any, ...]:
    with db.connect() as connection:
        rows = [
            connection.execute(
                sa.text(f"SELECT * FROM {table} WHERE job_id = :id ORDER BY 1, 2"), {"id": job_id}
            )
            .mappings()
            .all()
            for table in TABLES
        ]
    return tuple([dict(row) for row in table] for table in rows)


@pytest.mark.parametrize("kind", WRITES)
def test_a_run_that_was_taken_over_writes_nothing(
    db: Database,
    objects: ObjectStore,
    make_job: MakeJob,
    take_job: TakeJob,
    kind: str,
) -> None:
    job_id = make_job(num_valid=2)
    stale = start_run(db, job_id, engine="e", policy="p", details={}, lease_s=-1)
    take_job(job_id)
    before = everything(db, job_id)

    with pytest.raises(StaleRunError):
        WRITES[kind](db, objects, stale)

    assert everything(db, job_id) == before
    assert objects.keys(f"jobs/{job_id}/plans/") == []


@pytest.mark.parametrize("kind", WRITES)
def test_a_run_whose_job_has_ended_writes_nothing(
    db: Database,
    objects: ObjectStore,
    make_job: MakeJob,
    take_job: TakeJob,
    kind: str,
) -> None:
    job_id = make_job(num_valid=2)
    run = take_job(job_id)
    set_job_status(db, job_id, JobStatus.CANCELLED, run=run)
    finish_run(db, run, RunStatus.CANCELLED)
    before = everything(db, job_id)

    with pytest.raises(StaleRunError):
        WRITES[kind](db, objects, run)

    assert everything(db, job_id) == before


@pytest.mark.parametrize("kind", sorted(set(WRITES) - {"requests", "sources"}))
def test_the_run_that_owns_the_job_writes(
    db: Database,
    objects: ObjectStore,
    make_job: MakeJob,
    take_job: TakeJob,
    kind: str,
) -> None:
    run = take_job(make_job(num_valid=2))
    before = everything(db, run.job_id)

    WRITES[kind](db, objects, run)

    assert everything(db, run.job_id) != before


def test_the_export_of_a_stale_run_is_not_recorded(
    db: Database, objects: ObjectStore, make_job: MakeJob, take_job: TakeJob
) -> None:
    job_id = make_job(num_valid=1)
    stale = start_run(db, job_id, engine="e", policy="p", details={}, lease_s=-1)
    close_pending(db, job_id, JobStatus.EXPIRED, run=take_job(job_id))

    with pytest.raises(StaleRunError):
        export_job(db, objects, job_id, run=stale)

    assert get_job(db, job_id).output_uri is None


def test_a_stale_export_changes_nothing_of_the_owners(
    db: Database, objects: ObjectStore, make_job: MakeJob, take_job: TakeJob
) -> None:
    job_id = make_job(num_valid=1)
    stale = start_run(db, job_id, engine="e", policy="p", details={}, lease_s=-1)
    owner = take_job(job_id)
    close_pending(db, job_id, JobStatus.EXPIRED, run=owner)
    exported = export_job(db, objects, job_id, run=owner)
    keys = objects.keys(f"jobs/{job_id}/outputs/{owner.key_part}/")
    contents = [objects.get(key) for key in keys]

    with pytest.raises(StaleRunError):
        export_job(db, objects, job_id, run=stale)

    assert get_job(db, job_id).table_uri == exported.table_uri
    assert [objects.get(key) for key in keys] == contents
    assert export_job(db, objects, job_id, run=owner) == exported
    assert all(owner.key_part in key for key in objects.keys(f"jobs/{job_id}/outputs/"))


def test_a_stale_run_ends_no_other_and_not_itself_again(
    db: Database, make_job: MakeJob, take_job: TakeJob
) -> None:
    job_id = make_job(num_valid=1)
    stale = start_run(db, job_id, engine="e", policy="p", details={}, lease_s=-1)
    take_job(job_id)
    before = everything(db, job_id)

    finish_run(db, stale, RunStatus.SUCCEEDED, error_message="late")

    assert everything(db, job_id) == before


def test_nobody_but_its_run_moves_a_job_that_is_executed(
    db: Database, make_job: MakeJob, take_job: TakeJob
) -> None:
    run = take_job(make_job(num_valid=1))

    with pytest.raises(StorageError, match=run.run_id):
        set_job_status(db, run.job_id, JobStatus.FAILED)

    assert get_job(db, run.job_id).status is JobStatus.VALIDATING


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE run SET details = '[]' WHERE run_id = :run_id",
        "UPDATE run SET engine_deaths = '[1]' WHERE run_id = :run_id",
        "UPDATE run SET lease_expires_at = now() + interval '1 day' WHERE run_id = :run_id",
        "INSERT INTO plan SELECT job_id, 1, :run_id, now(), policy, model, device, block_size, num_requests,"
        " num_prompt_tokens, estimated_output_tokens, compute_s, memory_s, density, prefix_sharing_best,"
        " prefix_sharing_planned, optimum_s, estimated_duration_s, plan_uri FROM plan WHERE job_id = :job_id",
    ],
)
def test_the_database_itself_refuses_a_stale_run(
    db: Database,
    objects: ObjectStore,
    make_job: MakeJob,
    take_job: TakeJob,
    statement: str,
) -> None:
    job_id = make_job(num_valid=2)
    save_plan(db, objects, job_id, plan_of(0))
    stale = start_run(db, job_id, engine="e", policy="p", details={}, lease_s=-1)
    take_job(job_id)

    with pytest.raises(StorageError, match=r"stays so|does not own"), db.connect() as connection:
        connection.execute(sa.text(statement), {"run_id": stale.run_id, "job_id": job_id})

    assert next_revision(db, job_id) == 1


def test_what_was_in_flight_is_halved_at_every_death_and_remembered(
    db: Database, objects: ObjectStore, make_job: MakeJob, take_job: TakeJob
) -> None:
    run = take_job(make_job(num_valid=8))

    def groups() -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for suspect in pending_suspects(db, run.job_id):
            found.setdefault(suspect.group_number, []).append(suspect.seq)
        return list(found.values())

    record_engine_death(db, run, "It was killed by signal SIGKILL.", [5, 1, 2, 6, 7], others_answered=False)
    assert groups() == [[1, 2, 5], [6, 7]]
    record_engine_death(db, run, "again\0", [1, 2], others_answered=False)
    assert groups() == [[5], [6, 7], [1], [2]]
    record(db, objects, run)
    record_engine_death(db, run, "and again", [2], others_answered=False)
    record_engine_death(db, run, "while it opened", [], others_answered=False)

    suspects = {suspect.seq: suspect for suspect in pending_suspects(db, run.job_id)}
    assert (suspects[2].num_deaths, suspects[2].num_deaths_alone) == (3, 1)
    assert (suspects[5].num_deaths, suspects[5].num_deaths_alone) == (1, 0)
    assert counts(db, run.job_id).succeeded == 1
    assert [(death.reason, death.num_in_flight) for death in engine_deaths(db, run.job_id)] == [
        ("It was killed by signal SIGKILL.", 5),
        ("again\ufffd", 2),
        ("and again", 1),
        ("while it opened", 0),
    ]


def test_a_request_is_to_blame_when_engines_live_without_it(
    db: Database, objects: ObjectStore, make_job: MakeJob, take_job: TakeJob
) -> None:
    run = take_job(make_job(num_valid=4))

    def is_culprit(seq: int) -> bool:
        return next(suspect for suspect in pending_suspects(db, run.job_id) if suspect.seq == seq).is_culprit

    def dies(seq: int, *, others_answered: bool) -> None:
        record_engine_death(db, run, "killed", [seq], others_answered=others_answered)

    # Engines die whatever they run: that tells nothing of the one that happens to run.
    dies(1, others_answered=True)
    dies(1, others_answered=False)
    dies(2, others_answered=False)
    assert not is_culprit(1)
    dies(2, others_answered=True)
    assert is_culprit(2)
    assert not is_culprit(1)
    dies(3, others_answered=False)
    for _ in range(3):
        assert not is_culprit(3)
        dies(3, others_answered=False)
    assert is_culprit(3)
