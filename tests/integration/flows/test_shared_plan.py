"""Ranks that share a plan lose no request, and run none twice, when requests change hands."""

from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from blend_core.plan import Plan
from flows.job_source import JobSource
from flows.stages.context import JobContext
from flows.stages.shared_plan import SharedPlan
from storage.recorder import Recorder
from storage.results import counts, pending_seqs
from tests.integration.flows.two_ranks import NO_SHARDS, NUM_REQUESTS, Seconds, answer, plan_of

pytestmark = [pytest.mark.postgres, pytest.mark.s3]


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
