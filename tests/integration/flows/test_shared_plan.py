"""Ranks that share a plan lose no request when leases change hands."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psycopg
import pytest
import sqlalchemy as sa

from blend_core.engines.base import EngineEvent, EngineInfo, RequestFinished, RequestsAdmitted, RequestSource
from blend_core.errors import EngineDiedError, StorageUnavailableError
from blend_core.performance import StepTimeModel
from blend_core.plan import Plan, PlanSummary, frozen
from blend_core.request import Request, SamplingParams
from flows.job_source import JobSource
from flows.job_spec import BatchJobSpec
from flows.progress import SilentProgress
from flows.running import create_job
from flows.settings import EngineSettings, Settings
from flows.stages.context import JobContext, run_in_threads
from flows.stages.engine_run import EngineRun, SharedParts
from flows.stages.parts import Part
from flows.stages.rank import Rank
from flows.stages.replan import Replanner
from flows.stages.shared_plan import SharedPlan
from flows.stopping import StopSignal
from flows.wiring import Endpoints, Wiring
from storage.database import Database
from storage.objects import ObjectStoreOptions
from storage.recorder import Recorder
from storage.requests import RequestRow, RequestWriter
from storage.results import counts, iter_results, pending_seqs
from storage.runs import start_run
from storage.suspects import engine_deaths

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
    engine = EngineSettings(restart_delay_s=0.01)
    wiring = Wiring.from_settings(Settings(home=tmp_path, engine=engine), endpoints)
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


class Seconds:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Seconds:
    return Seconds()


@pytest.fixture
def shared(context: JobContext, recorder: Recorder, clock: Seconds) -> Iterator[SharedPlan]:
    """The plan, dealt to two ranks."""
    plan = plan_of(NUM_REQUESTS)
    with Replanner(context, NO_SHARDS, plan, plan) as replanner:
        yield SharedPlan(context, recorder, replanner, plan, plan, num_ranks=2, clock=clock)


def plan_of(count: int, revision: int = 0) -> Plan:
    """A whole plan of equal requests without samples."""
    per_request = frozen(np.ones(count))
    tokens = frozen(np.full(count, 10, dtype=np.int32))
    return Plan(
        revision=revision,
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


def run_engine(shared: SharedPlan, rank: int) -> JobSource:
    """An engine of the rank is given all that the rank holds; its source."""
    source = JobSource(shared.plan, NO_SHARDS.fetch)
    assert shared.hand_out(rank, source, shared.requests_of(rank)) == shared.requests_of(rank)
    return source


def end_what_a_rank_holds(shared: SharedPlan, rank: int) -> None:
    for seq in shared.requests_of(rank):
        assert shared.ended(rank, answer(seq))


def test_what_an_engine_may_start_goes_to_another_rank_when_it_was_given_back(shared: SharedPlan) -> None:
    source = run_engine(shared, 0)
    end_what_a_rank_holds(shared, 1)

    assert not shared.take_over(1)
    started, *others = asked = list(source.recalled())
    assert set(asked) <= set(shared.requests_of(0))
    # Asked once, however often the idle rank looks.
    assert not shared.take_over(1)
    assert source.recalled() == []
    # The engine has started one of them; its rank is told of that a moment late.
    shared.started(0, [started])
    shared.released(0, others, [started])

    assert shared.requests_of(1) == others
    assert shared.holds(0, started)
    assert shared.take_change(1)


def test_what_ended_before_it_could_be_given_back_is_not_run_again(shared: SharedPlan) -> None:
    source = run_engine(shared, 0)
    end_what_a_rank_holds(shared, 1)
    shared.take_over(1)
    ended, *others = source.recalled()

    assert shared.ended(0, answer(ended))
    shared.released(0, [ended, *others], [])

    assert shared.requests_of(1) == others


def test_nothing_that_is_asked_back_reaches_an_engine(shared: SharedPlan) -> None:
    source = run_engine(shared, 0)
    end_what_a_rank_holds(shared, 1)
    shared.take_over(1)
    asked = set(source.recalled())

    given = shared.hand_out(0, source, shared.requests_of(0))

    assert asked
    assert set(given) == set(shared.requests_of(0)) - asked
    assert not asked & set(source.plan().seq.tolist())


def test_an_engine_that_does_not_answer_is_not_waited_for(shared: SharedPlan, clock: Seconds) -> None:
    source = run_engine(shared, 0)
    end_what_a_rank_holds(shared, 1)
    assert not shared.take_over(1)
    first = list(source.recalled())

    clock.now = 6.0
    assert shared.take_over(1)
    assert set(shared.requests_of(1)) > set(first)
    end_what_a_rank_holds(shared, 1)
    assert shared.take_over(1)
    end_what_a_rank_holds(shared, 1)
    # What it tells shows that it runs: it is asked again.
    shared.started(0, shared.requests_of(0)[:1])
    assert not shared.take_over(1)


class OneRevision:
    """A replanner that has a revision ready."""

    is_due = False

    def __init__(self, revised: Plan) -> None:
        self._revised: Plan | None = revised

    def take(self) -> Plan | None:
        revised, self._revised = self._revised, None
        return revised

    def ended(self, seq: int) -> None:
        pass


def test_a_revision_deals_anew_what_the_engines_give_back(context: JobContext, recorder: Recorder) -> None:
    plan = plan_of(NUM_REQUESTS)
    revised = plan_of(NUM_REQUESTS, revision=1)
    replanner: Any = OneRevision(revised)
    shared = SharedPlan(context, recorder, replanner, plan, plan, num_ranks=2)
    # Rank 1 has done most of its part when the rest is dealt anew.
    for seq in shared.requests_of(1)[:20]:
        assert shared.ended(1, answer(seq))
    held = [set(shared.requests_of(rank)) for rank in (0, 1)]
    sources = [run_engine(shared, rank) for rank in (0, 1)]

    shared.revise()
    asked = [set(source.recalled()) for source in sources]
    assert [set(shared.requests_of(rank)) for rank in (0, 1)] == held
    for rank in (0, 1):
        shared.released(rank, sorted(asked[rank]), [])

    now = [set(shared.requests_of(rank)) for rank in (0, 1)]
    assert len(asked[0]) > len(asked[1])
    assert now == [held[0] - asked[0] | asked[1], held[1] - asked[1] | asked[0]]
    assert abs(len(now[0]) - len(now[1])) <= 2


def test_while_the_database_is_away_a_rank_works_on_and_takes_nothing(
    context: JobContext, shared: SharedPlan, clock: Seconds, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_what_a_rank_holds(shared, 1)
    before = shared.requests_of(0)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise psycopg.OperationalError("connection refused")

    with monkeypatch.context() as away:
        away.setattr("storage.database.psycopg.connect", refuse)
        assert not shared.take_over(1)
        shared.release_expired()
        assert shared.ended(0, answer(before[0]))

    # It is asked again after a pause.
    assert not shared.take_over(1)
    clock.now = 6.0
    assert shared.take_over(1)
    assert sorted([*shared.requests_of(0), *shared.requests_of(1)]) == sorted(before[1:])


class AwayRequests:
    """Requests in an object store that does not answer at first."""

    def __init__(self) -> None:
        self.num_asked = 0

    def fetch(self, seqs: Sequence[int]) -> Sequence[Request]:
        self.num_asked += 1
        if self.num_asked < 3:
            raise StorageUnavailableError("The object store did not answer.")
        return [Request(seq, np.array([1], dtype=np.int32), SamplingParams(max_tokens=4)) for seq in seqs]


class FetchingEngine:
    """Asks for requests before it answers them."""

    pid = None

    def open(self) -> EngineInfo:
        return EngineInfo("fetching", NOTHING, NOTHING, NOTHING, {})

    def run(self, source: RequestSource) -> Iterator[EngineEvent]:
        for request in source.fetch(source.plan().seq.tolist()):
            yield answer(request.seq)


def test_an_engine_waits_for_requests_while_the_object_store_is_away(
    context: JobContext, shared: SharedPlan, recorder: Recorder
) -> None:
    part = Part(np.array(shared.requests_of(0), dtype=np.int64), is_suspect=False)
    requests: Any = AwayRequests()
    engine: Any = FetchingEngine()

    run = EngineRun(context, SharedParts(shared, requests, recorder), 0, part, 0)
    run.run(engine)

    assert (requests.num_asked, run.num_answers) == (3, len(part.seqs))


class DyingEngine:
    """Answers one request after the other; dies of some, or whatever it runs."""

    pid = None

    def __init__(self, shared: SharedPlan, deadly: set[int] | None) -> None:
        self._shared = shared
        self._deadly = deadly

    def open(self) -> EngineInfo:
        return EngineInfo("dying", NOTHING, NOTHING, NOTHING, {})

    def run(self, source: RequestSource) -> Iterator[EngineEvent]:
        for seq in source.plan().seq.tolist():
            yield RequestsAdmitted((seq,))
            # The other rank is well all the time.
            for other in self._shared.requests_of(1)[:1]:
                assert self._shared.ended(1, answer(other))
            if self._deadly is None or seq in self._deadly:
                raise EngineDiedError("It died.")
            yield answer(seq)

    def close(self) -> None:
        pass


def errored(context: JobContext) -> list[int]:
    return [row.seq for row in iter_results(context.wiring.database, context.job_id) if row.error_code]


def test_a_request_is_set_aside_when_the_rank_s_own_engines_answered_others(
    context: JobContext, shared: SharedPlan, recorder: Recorder
) -> None:
    deadly = shared.requests_of(0)[3]
    engine: Any = DyingEngine(shared, {deadly})

    Rank(context, 0, engine, SharedParts(shared, NO_SHARDS, recorder), 0).run()
    recorder.flush()

    assert errored(context) == [deadly]
    assert len(engine_deaths(context.wiring.database, context.job_id)) == 2


def test_answers_of_another_rank_are_no_evidence_against_a_request(
    context: JobContext, shared: SharedPlan, recorder: Recorder
) -> None:
    for seq in shared.requests_of(0)[2:]:
        assert shared.ended(0, answer(seq))
    # Nothing is left to take over.
    shared.started(1, shared.requests_of(1))
    engine: Any = DyingEngine(shared, None)

    Rank(context, 0, engine, SharedParts(shared, NO_SHARDS, recorder), 0).run()
    recorder.flush()

    assert errored(context) == []
    assert shared.live_ranks == [1]
