"""The ends of a run, by hand and against simulated runs."""

from dataclasses import replace

import pytest

from blend_core.engines.base import StepWindow
from blend_core.performance import StepTimeModel
from blend_core.planner import PlanConfig, build_plan
from blend_core.simulator import simulate
from blend_core.studies.run_ends import RunEnds, least_start_s, run_ends
from blend_core.studies.study import BLOCK_SIZE, study_limits
from flows.bench.study_tasks import study_model

WINDOW = StepWindow(*(0 for _ in StepWindow.__dataclass_fields__))


def windows(*usages, started_at=100.0):
    return [
        replace(WINDOW, started_at=started_at + 2 * place, duration_s=2.0, kv_usage=usage)
        for place, usage in enumerate(usages)
    ]


def test_the_ends_lie_outside_the_first_and_the_last_full_window():
    assert run_ends(windows(0.1, 0.5, 0.95, 0.2, 0.9, 0.8)) == RunEnds(4.0, 2.0)
    assert run_ends(windows(0.9)) == RunEnds(0.0, 0.0)


def test_a_run_that_never_fills_kv_is_all_start():
    assert run_ends(windows(0.1, 0.2, 0.1)) == RunEnds(6.0, 0.0)


@pytest.mark.parametrize("policy", ["fcfs", "density_matched"])
def test_no_run_starts_faster_than_its_bound(make_workload, policy):
    model, device = study_model()
    limits = replace(study_limits(model, device), num_blocks=2_000)
    workload = make_workload()
    plan = build_plan(workload.requests, model, device, PlanConfig(policy, BLOCK_SIZE))
    result = simulate(
        workload.requests, workload.num_output_tokens, plan, policy, model, device, limits, overlap=True
    )
    times = StepTimeModel.of(model, device)
    assert run_ends(result.windows).start_s >= least_start_s(times, limits) - result.windows[0].duration_s
    assert run_ends(result.windows).start_s < result.duration_s
