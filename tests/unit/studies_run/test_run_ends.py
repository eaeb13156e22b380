"""The ends of a run, by hand and against simulated runs."""

from dataclasses import replace

import numpy as np
import pytest

from blend_core.engines.base import StepWindow
from blend_core.performance import StepTimeModel
from blend_core.planner import PlanConfig, build_plan
from blend_core.segment_requests import SegmentRequests
from blend_core.simulator import simulate
from blend_core.studies.run_ends import RunEnds, least_start_s, run_ends
from blend_core.studies.study import BLOCK_SIZE, study_limits
from flows.bench.study_tasks import study_target

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
@pytest.mark.parametrize(
    ("prompt_tokens", "output_tokens", "num_requests"),
    [(30_400, 10, 1), (1, 40, 1_880), (17, 200, 940), (900, 300, 60)],
    ids=["one long prompt", "single tokens", "a token over a block", "long prompts"],
)
def test_no_run_starts_faster_than_its_bound(policy, prompt_tokens, output_tokens, num_requests):
    target = study_target()
    model, device = target.model, target.device
    limits = replace(study_limits(model, device), num_blocks=2_000, max_num_seqs=num_requests)
    requests = SegmentRequests(
        seq=np.arange(num_requests),
        segment_ids=np.arange(num_requests),
        segment_tokens=np.full(num_requests, prompt_tokens),
        offsets=np.arange(num_requests + 1),
        min_tokens=np.full(num_requests, output_tokens, dtype=np.int32),
        max_tokens=np.full(num_requests, output_tokens, dtype=np.int32),
    )
    lengths = np.full(num_requests, output_tokens)
    plan = build_plan(requests, model, device, PlanConfig(policy, BLOCK_SIZE))
    result = simulate(requests, lengths, plan, policy, model, device, limits, overlap=True)
    # To a window exactly: a run of so few steps is one.
    least_s = least_start_s(StepTimeModel.of(model, device), limits, prompt_tokens)
    assert run_ends(result.windows).start_s >= least_s - result.windows[0].duration_s
    assert least_s < result.duration_s


def test_the_bound_is_what_computing_so_much_kv_takes():
    target = study_target()
    model, device = target.model, target.device
    times, limits = StepTimeModel.of(model, device), replace(study_limits(model, device), max_num_seqs=1)
    num_tokens = 0.9 * limits.num_blocks * 16 - 15 - 1_000
    steps = num_tokens / 2_048
    assert least_start_s(times, limits, 1_000) == pytest.approx(
        steps * (times.gemm_fixed_s + 2_048 * times.gemm_s_per_token)
    )
