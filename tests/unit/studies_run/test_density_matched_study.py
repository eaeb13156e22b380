"""On a mix of chat, video-like answers and questions behind common beginnings."""

import numpy as np
import pytest
from duration_bound import least_duration_s

from blend_core.planner import PlanConfig, build_plan
from blend_core.policies.base import EngineLimits
from blend_core.prefix_tree import build_prefix_tree
from blend_core.segment_requests import SegmentRequests
from blend_core.simulator import simulate

BLOCK_SIZE = 16
POLICIES = ("dfs", "dual_scan", "density_matched")


@pytest.fixture(params=[True, False], ids=["preset", "hidden"])
def results(request, make_workload, model, device):
    workload = make_workload(900, 400, 3_000, preset=request.param, longest=3_000)
    limits = EngineLimits(BLOCK_SIZE, 8_000, 4_096, 2_048)
    runs = {}
    for name in POLICIES:
        plan = build_plan(workload.requests, model, device, PlanConfig(name, BLOCK_SIZE))
        runs[name] = simulate(
            workload.requests, workload.num_output_tokens, plan, name, model, device, limits, overlap=True
        )
    tree = build_prefix_tree(workload.requests, BLOCK_SIZE)
    bound = least_duration_s(
        model,
        device,
        tree.num_prompt_tokens,
        tree.num_shared_tokens,
        workload.num_output_tokens[tree.leaf_row],
        block_size=BLOCK_SIZE,
        kv_capacity_tokens=8_000 * BLOCK_SIZE,
        max_num_batched_tokens=2_048,
        overlap=True,
    )
    return runs, bound, workload


def test_density_matching_is_at_least_as_fast_as_the_others(results):
    runs, bound, workload = results
    fastest = min(runs["dfs"].duration_s, runs["dual_scan"].duration_s)
    assert bound <= runs["density_matched"].duration_s <= fastest
    assert runs["density_matched"].num_refused == 0
    finished = sum(window.num_finished for window in runs["density_matched"].windows)
    assert finished == len(workload.requests)


@pytest.mark.parametrize("max_tokens", [2, 256, 4_096])
def test_answers_of_one_token_take_no_longer_than_in_order(model, device, max_tokens):
    num_requests = 400
    prompts = np.random.default_rng(0).integers(500, 3_000, num_requests)
    requests = SegmentRequests(
        seq=np.arange(num_requests),
        segment_ids=np.arange(num_requests),
        segment_tokens=prompts,
        offsets=np.arange(num_requests + 1),
        min_tokens=np.zeros(num_requests, dtype=np.int32),
        max_tokens=np.full(num_requests, max_tokens, dtype=np.int32),
    )
    limits = EngineLimits(BLOCK_SIZE, 8_000, 4_096, 2_048)
    seconds = {}
    for name in ("dfs", "density_matched"):
        plan = build_plan(requests, model, device, PlanConfig(name, BLOCK_SIZE))
        lengths = np.ones(num_requests, dtype=np.int64)
        run = simulate(requests, lengths, plan, name, model, device, limits, overlap=True)
        seconds[name] = run.duration_s
    assert seconds["density_matched"] <= 1.02 * seconds["dfs"]
