from collections.abc import Callable

import pytest

from blend_core.plan import Plan
from flows.job_source import pending_part
from flows.stages.plan_progress import PlanProgress

MakePlan = Callable[..., Plan]


def test_the_share_grows_by_the_work_of_what_ended(make_plan: MakePlan) -> None:
    plan = make_plan((0, 1, 2), memory_s=(1.0, 2.0, 4.0))
    progress = PlanProgress(plan, plan)
    assert progress.share == 0.0

    progress.ended(2)

    assert progress.share == pytest.approx(0.5)


def test_an_ended_request_counts_once_and_a_strange_one_never(make_plan: MakePlan) -> None:
    plan = make_plan((0, 1))
    progress = PlanProgress(plan, plan)

    for seq in (1, 1, 77):
        progress.ended(seq)

    assert progress.share == pytest.approx(0.5)


def test_what_ended_in_an_earlier_run_is_finished_from_the_start(make_plan: MakePlan) -> None:
    plan = make_plan((0, 1, 2, 3))

    assert PlanProgress(plan, pending_part(plan, [0])).share == pytest.approx(0.75)


def test_planned_density_is_read_at_the_share_of_finished_work(make_plan: MakePlan) -> None:
    plan = make_plan((0, 1), progress=(0.0, 1.0), planned_density=(4.0, 2.0))
    progress = PlanProgress(plan, plan)
    assert progress.planned_density == pytest.approx(4.0)

    progress.ended(0)

    assert progress.planned_density == pytest.approx(3.0)


def test_a_plan_that_was_not_simulated_has_no_planned_density(make_plan: MakePlan) -> None:
    plan = make_plan((0, 1))

    assert PlanProgress(plan, plan).planned_density is None
