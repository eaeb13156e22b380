from collections.abc import Callable
from typing import Any

from blend_core.plan import Plan
from flows.job_source import pending_part
from flows.stages.replan import Replanner

MakePlan = Callable[..., Plan]

# A replanner looks at the run only when it starts to plan.
NO_CONTEXT: Any = None
NO_SHARDS: Any = None


def test_a_revision_is_due_when_every_lead_request_has_ended(make_plan: MakePlan) -> None:
    plan = make_plan((0, 1, 2, 3, 4), lead=(1, 3))
    replanner = Replanner(NO_CONTEXT, NO_SHARDS, plan, plan)

    replanner.ended(1)
    assert not replanner.is_due
    replanner.ended(3)

    assert replanner.is_due


def test_a_straggler_holds_the_revision_back_until_a_quarter_has_ended(make_plan: MakePlan) -> None:
    plan = make_plan(tuple(range(100)), lead=tuple(range(20)))
    replanner = Replanner(NO_CONTEXT, NO_SHARDS, plan, plan)

    for seq in range(19):
        replanner.ended(seq)
    assert not replanner.is_due
    for seq in range(50, 56):
        replanner.ended(seq)

    assert replanner.is_due


def test_many_open_lead_requests_hold_it_back_however_much_has_ended(make_plan: MakePlan) -> None:
    plan = make_plan(tuple(range(100)), lead=tuple(range(20)))
    replanner = Replanner(NO_CONTEXT, NO_SHARDS, plan, plan)

    for seq in range(10, 100):
        replanner.ended(seq)

    assert not replanner.is_due


def test_nothing_is_due_without_lead_requests(make_plan: MakePlan) -> None:
    plan = make_plan((0, 1, 2))
    replanner = Replanner(NO_CONTEXT, NO_SHARDS, plan, plan)

    replanner.ended(0)

    assert not replanner.is_due


def test_a_later_revision_is_not_planned_anew(make_plan: MakePlan) -> None:
    plan = make_plan((0, 1, 2), revision=1, lead=(0,))
    replanner = Replanner(NO_CONTEXT, NO_SHARDS, plan, plan)

    replanner.ended(0)

    assert not replanner.is_due


def test_lead_requests_that_ended_in_an_earlier_run_make_it_due_at_once(make_plan: MakePlan) -> None:
    plan = make_plan((0, 1, 2, 3), lead=(0, 1))

    assert Replanner(NO_CONTEXT, NO_SHARDS, plan, pending_part(plan, [2, 3])).is_due


def test_nothing_is_due_when_nothing_is_left_to_plan(make_plan: MakePlan) -> None:
    plan = make_plan((0, 1), lead=(0, 1))
    replanner = Replanner(NO_CONTEXT, NO_SHARDS, plan, plan)

    replanner.ended(0)
    replanner.ended(1)

    assert not replanner.is_due
