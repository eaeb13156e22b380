"""What a rank does with engines that are slow, wait for requests, or die."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from blend_core.engines.base import EngineEvent, EngineInfo, RequestsAdmitted, RequestSource
from blend_core.errors import EngineDiedError, StorageUnavailableError
from blend_core.request import Request, SamplingParams
from flows.stages import engine_run, rank
from flows.stages.context import JobContext
from flows.stages.engine_run import EngineRun, SharedParts
from flows.stages.parts import Part
from flows.stages.rank import Rank
from flows.stages.shared_plan import SharedPlan
from flows.stopping import StopReason, StopSignal
from storage.recorder import Recorder
from storage.results import iter_results
from storage.suspects import engine_deaths
from tests.integration.flows.two_ranks import NO_SHARDS, NOTHING, answer

pytestmark = [pytest.mark.postgres, pytest.mark.s3]


class EngineInThisProcess:
    """What a rank asks of an engine's process; this one is not killed, since it is not silent for long."""

    pid = None

    def kill(self) -> None:
        raise AssertionError("the engine is killed")

    def close(self) -> None:
        pass


class SlowEngine(EngineInThisProcess):
    """An engine that answers everything; while it opens, the other rank takes over what it can."""

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


class AwayRequests:
    """Requests in an object store that does not answer at first."""

    def __init__(self) -> None:
        self.num_asked = 0

    def fetch(self, seqs: Sequence[int]) -> Sequence[Request]:
        self.num_asked += 1
        if self.num_asked < 3:
            raise StorageUnavailableError("The object store did not answer.")
        return [Request(seq, np.array([1], dtype=np.int32), SamplingParams(max_tokens=4)) for seq in seqs]


class FetchingEngine(EngineInThisProcess):
    """Asks for requests before it answers them."""

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


class LoadingEngine(EngineInThisProcess):
    """Loads its model until it is killed; the run is told to stop meanwhile, where a signal is given."""

    def __init__(self, stop: StopSignal | None = None) -> None:
        self._stop = stop
        self._is_killed = threading.Event()

    def open(self) -> EngineInfo:
        if self._stop is not None:
            self._stop.request(StopReason.INTERRUPTED)
        assert self._is_killed.wait(60.0)
        raise EngineDiedError("It ended.")

    def kill(self) -> None:
        self._is_killed.set()


def test_a_run_that_is_told_to_stop_waits_for_no_engine_that_loads(
    context: JobContext, shared: SharedPlan, recorder: Recorder
) -> None:
    engine: Any = LoadingEngine(context.stop)

    begun_s = time.monotonic()
    Rank(context, 0, engine, SharedParts(shared, NO_SHARDS, recorder), 0).run()

    assert time.monotonic() - begun_s < 20.0
    assert not engine_deaths(context.wiring.database, context.job_id)


def test_an_engine_that_loads_for_too_long_is_told_with_the_setting_for_that(
    context: JobContext, shared: SharedPlan, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = context.wiring.settings
    engine_settings = settings.engine.model_copy(update={"start_limit_s": 0.2})
    monkeypatch.setattr(context.wiring, "settings", settings.model_copy(update={"engine": engine_settings}))
    part = Part(np.array(shared.requests_of(0), dtype=np.int64), is_suspect=False)
    engine: Any = LoadingEngine()

    with pytest.raises(EngineDiedError, match="Raise BLEND_ENGINE__START_LIMIT_S if it"):
        EngineRun(context, SharedParts(shared, NO_SHARDS, recorder), 0, part, 0).run(engine)


def away_at_first(work: Callable[..., Any], num_times: int = 2) -> Callable[..., Any]:
    """Work that a service which is away fails some times first."""
    left = [StorageUnavailableError("Away.")] * num_times

    def call(*arguments: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return work(*arguments, **named)

    return call


@pytest.mark.parametrize(
    ("module", "name"),
    [(rank, "next_part"), (rank, "set_culprits_aside"), (engine_run, "set_run_details")],
)
def test_a_rank_outlasts_a_service_that_is_away_between_two_parts_or_when_its_engine_is_up(
    context: JobContext,
    shared: SharedPlan,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    name: str,
) -> None:
    monkeypatch.setattr(module, name, away_at_first(getattr(module, name)))
    engine: Any = DyingEngine(shared, set())

    Rank(context, 0, engine, SharedParts(shared, NO_SHARDS, recorder), 0).run()

    assert shared.is_done


def test_a_rank_outlasts_a_service_that_is_away_when_it_is_given_up(
    context: JobContext, shared: SharedPlan, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedPlan, "give_up", away_at_first(SharedPlan.give_up))
    shared.started(1, shared.requests_of(1))
    engine: Any = DyingEngine(shared, None)

    Rank(context, 0, engine, SharedParts(shared, NO_SHARDS, recorder), 0).run()

    assert shared.live_ranks == [1]


class DyingEngine(EngineInThisProcess):
    """Answers one request after the other; dies of some, or whatever it runs."""

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


def errored(context: JobContext) -> list[int]:
    return [row.seq for row in iter_results(context.wiring.database, context.job_id) if row.error_code]


def test_a_request_is_set_aside_when_the_rank_s_own_engines_answered_others(
    context: JobContext, shared: SharedPlan, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(context.progress, "note", notes.append)
    deadly = shared.requests_of(0)[3]
    engine: Any = DyingEngine(shared, {deadly})

    Rank(context, 0, engine, SharedParts(shared, NO_SHARDS, recorder), 0).run()
    recorder.flush()

    assert errored(context) == [deadly]
    deaths = engine_deaths(context.wiring.database, context.job_id)
    assert [death.reason for death in deaths] == ["Rank 0: It died."] * 2
    assert notes[0] == (
        "Rank 0: It died. Starting it again in 0 s (death 1 in a row); 1 request in flight will run apart "
        "from the others."
    )


class BatchEngine(DyingEngine):
    """Takes all of its requests at once, and dies before any answer if one of them is deadly."""

    def run(self, source: RequestSource) -> Iterator[EngineEvent]:
        for other in self._shared.requests_of(1):
            assert self._shared.ended(1, answer(other))
        seqs = tuple(source.plan().seq.tolist())
        yield RequestsAdmitted(seqs)
        if self._deadly and self._deadly & set(seqs):
            raise EngineDiedError("It died.")
        yield from map(answer, seqs)


def test_deaths_count_no_further_once_other_requests_were_answered(
    context: JobContext, shared: SharedPlan, recorder: Recorder
) -> None:
    held = shared.requests_of(0)
    deadly = held[len(held) // 2]
    engine: Any = BatchEngine(shared, {deadly})

    Rank(context, 0, engine, SharedParts(shared, NO_SHARDS, recorder), 0).run()
    recorder.flush()

    assert errored(context) == [deadly]
    # More than are allowed in a row: what was in flight is halved until one is left.
    num_deaths = len(engine_deaths(context.wiring.database, context.job_id))
    assert num_deaths > context.wiring.settings.engine.max_restarts + 1


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
