"""Ranks that share a plan lose no request when leases change hands."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from blend_core.engines.base import EngineEvent, EngineInfo, RequestFinished, RequestSource
from blend_core.performance import StepTimeModel
from blend_core.plan import Plan, PlanSummary, frozen
from flows.job_spec import BatchJobSpec
from flows.progress import SilentProgress
from flows.running import create_job
from flows.settings import Settings
from flows.stages.context import JobContext, run_in_threads
from flows.stages.engine_run import EngineRun, SharedParts
from flows.stages.parts import Part
from flows.stages.replan import Replanner
from flows.stages.shared_plan import SharedPlan
from flows.stopping import StopSignal
from flows.wiring import Endpoints, Wiring
from storage.database import Database
from storage.objects import ObjectStoreOptions
from storage.recorder import Recorder
from storage.requests import RequestRow, RequestWriter
from storage.results import counts, pending_seqs
from storage.runs import start_run

pytestmark = [pytest.mark.postgres, pytest.mark.s3]

NUM_REQUESTS = 64

# A plan without samples is not planned anew, and the engine here looks at no request.
NO_SHARDS: Any = SimpleNamespace(fetch=None)
NOTHING: Any = None


@pytest.fixture
def context(db: Database, object_store_options: ObjectStoreOptions, tmp_path: Path) -> Iterator[JobContext]:
    """A run of a job that has been read."""
    endpoints = Endpoints(
        database_url=db.url,
        s3_endpoint_url=object_store_options.endpoint_url,
        s3_bucket=object_store_options.bucket,
        s3_access_key=object_store_options.access_key,
        s3_secret_key=object_store_options.secret_key,
        s3_region=object_store_options.region,
    )
    wiring = Wiring.from_settings(Settings(home=tmp_path), endpoints)
    spec = BatchJobSpec.model_validate({"name": "n", "s3": ["s3://b/k"]})
    job_id = create_job(wiring, spec)
    with RequestWriter(db, job_id) as writer:
        for seq in range(NUM_REQUESTS):
            writer.add(RequestRow(seq, "s3://b/k", seq + 1, num_prompt_tokens=20, max_tokens=10))
    run = start_run(db, job_id, engine="none", policy="fcfs", details={}, lease_s=60)
    yield JobContext(wiring, spec, run, StopSignal(), SilentProgress(), run_in_threads)
    wiring.close()


@pytest.fixture
def recorder(context: JobContext) -> Iterator[Recorder]:
    """One that commits when it is told to, as with a database that is slow."""
    wiring = context.wiring
    with Recorder(wiring.database, wiring.objects, context.run, flush_interval_s=600) as recorder:
        yield recorder


@pytest.fixture
def shared(context: JobContext, recorder: Recorder) -> Iterator[SharedPlan]:
    """The plan, dealt to two ranks."""
    plan = plan_of(NUM_REQUESTS)
    with Replanner(context, NO_SHARDS, plan, plan) as replanner:
        yield SharedPlan(context, recorder, replanner, plan, plan, num_ranks=2)


def plan_of(count: int) -> Plan:
    """A whole plan of equal requests without samples."""
    per_request = frozen(np.ones(count))
    tokens = frozen(np.full(count, 10, dtype=np.int32))
    return Plan(
        revision=0,
        policy="fcfs",
        summary=PlanSummary("tiny", "cpu", 4, count, 10 * count, 5.0, 1.0, 0.5, 2.0, 0.5, 0.4, 1.0, None),
        seq=frozen(np.arange(count, dtype=np.int64)),
        num_prompt_tokens=tokens,
        num_shared_tokens=frozen(np.zeros(count, dtype=np.int32)),
        max_tokens=tokens,
        estimated_output_tokens=per_request,
        estimated_output_tokens_sq=per_request,
        compute_s=per_request,
        memory_s=per_request,
        lead=frozen(np.zeros(count, dtype=np.bool_)),
        length_group=frozen(np.full(count, -1, dtype=np.int32)),
        length_groups=(),
        step_times=StepTimeModel(1e-3, 1e-5, 2e-3, 1e-9, 1e-7, 0.15),
        progress=frozen(np.array([0.0, 1.0])),
        planned_density=frozen(np.array([1.0, 1.0])),
    )


def answer(seq: int) -> RequestFinished:
    return RequestFinished(seq, 0, "Paris.", (1, 2, 3), "stop", 10, 4, 1_700_000_000.25, 1_700_000_001.5)


def let_leases_run_out(context: JobContext) -> None:
    with context.wiring.database.connect() as connection:
        connection.execute(
            sa.text(
                "UPDATE shard SET lease_expires_at = clock_timestamp() - interval '1 s'"
                " WHERE run_id = :run_id AND rank = 0 AND status = 'leased'"
            ),
            {"run_id": context.run.run_id},
        )


def answer_all(shared: SharedPlan, rank: int) -> None:
    """The rank takes over what it can get and answers all that it holds."""
    while not shared.is_done:
        for seq in shared.requests_of(rank):
            assert shared.ended(rank, answer(seq))
        assert shared.take_over(rank) or shared.is_done


def test_what_ended_before_its_lease_ran_out_is_kept_and_the_rest_runs_elsewhere(
    context: JobContext, shared: SharedPlan, recorder: Recorder
) -> None:
    first, second, *_ = shared.requests_of(0)
    shared.started(0, [first, second])
    assert shared.ended(0, answer(first))
    let_leases_run_out(context)

    shared.release_expired()
    assert shared.requests_of(0) == []
    assert not shared.ended(0, answer(second))
    answer_all(shared, 1)
    recorder.flush()

    assert pending_seqs(context.wiring.database, context.job_id).tolist() == []
    assert counts(context.wiring.database, context.job_id).succeeded == NUM_REQUESTS


def test_what_a_rank_ended_before_it_was_given_up_is_kept(
    context: JobContext, shared: SharedPlan, recorder: Recorder
) -> None:
    first, second, *_ = shared.requests_of(0)
    shared.started(0, [first, second])
    assert shared.ended(0, answer(first))

    assert shared.give_up(0)
    assert not shared.give_up(1)
    answer_all(shared, 1)
    recorder.flush()

    assert pending_seqs(context.wiring.database, context.job_id).tolist() == []
    assert shared.live_ranks == [1]


class SlowEngine:
    """An engine that answers everything; while it opens, the other rank takes over what it can."""

    pid = None

    def __init__(self, shared: SharedPlan) -> None:
        self.ran: list[int] = []
        self._shared = shared

    def open(self) -> EngineInfo:
        for seq in self._shared.requests_of(1):
            assert self._shared.ended(1, answer(seq))
        assert self._shared.take_over(1)
        return EngineInfo("slow", NOTHING, NOTHING, NOTHING, {})

    def run(self, source: RequestSource) -> Iterator[EngineEvent]:
        self.ran = source.plan().seq.tolist()
        for seq in self.ran:
            yield answer(seq)


def test_an_engine_does_not_begin_what_was_taken_over_while_it_opened(
    context: JobContext, shared: SharedPlan, recorder: Recorder
) -> None:
    held = shared.requests_of(0)
    part = Part(np.array(held, dtype=np.int64), is_suspect=False)
    engine: Any = SlowEngine(shared)

    EngineRun(context, SharedParts(shared, NO_SHARDS, recorder), 0, part, 0).run(engine)

    assert 0 < len(shared.requests_of(1)) < len(held)
    assert sorted([*engine.ran, *shared.requests_of(1)]) == sorted(held)
