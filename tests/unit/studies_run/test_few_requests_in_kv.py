"""Where KV holds a few requests, the default policy is no slower than depth-first order by more than it costs
to learn lengths."""

import numpy as np
import pytest

from blend_core.planner import PlanConfig, build_plan
from blend_core.policies.base import EngineLimits
from blend_core.segment_requests import SegmentRequests
from blend_core.simulator import simulate
from blend_core.studies.replanning import SampleReplanner
from flows.bench.study_tasks import study_target


def workload(num_requests, prompts, outputs, max_tokens, prefix_tokens=0, seed=1):
    """Requests of unknown length, behind one prefix if it has tokens."""
    generator = np.random.default_rng(seed)
    own = generator.integers(*prompts, num_requests)
    num_output_tokens = generator.integers(*outputs, num_requests)
    names = np.arange(1, num_requests + 1)
    if prefix_tokens:
        ids, tokens = np.stack((0 * names, names), 1), np.stack((0 * own + prefix_tokens, own), 1)
    else:
        ids, tokens = names[:, None], own[:, None]
    requests = SegmentRequests(
        seq=names - 1,
        segment_ids=ids.ravel(),
        segment_tokens=tokens.ravel(),
        offsets=ids.shape[1] * np.arange(num_requests + 1),
        min_tokens=np.zeros(num_requests, dtype=np.int32),
        max_tokens=np.full(num_requests, max_tokens, dtype=np.int32),
    )
    return requests, num_output_tokens


def simulated_s(policy, requests, num_output_tokens, limits):
    target = study_target()
    model, device = target.model, target.device
    config = PlanConfig(policy, limits.block_size, 0, max_num_batched_tokens=limits.max_num_batched_tokens)
    plan = build_plan(requests, model, device, config)
    feedback = SampleReplanner(requests, plan, model, device, config)
    run = simulate(
        requests, num_output_tokens, plan, policy, model, device, limits, overlap=True, feedback=feedback
    )
    return run.duration_s


@pytest.mark.parametrize(
    ("requests", "kv_tokens", "max_num_batched_tokens"),
    [
        (workload(400, (10, 200), (1, 200), 256), 480, 2_048),
        (workload(400, (100, 500), (1, 200), 256), 8_192, 512),
        (workload(150, (1_000, 4_000), (1, 200), 256), 8_192, 512),
        (workload(120, (2_000, 6_000), (1, 200), 1_024), 32_000, 128),
        (workload(120, (2_000, 6_000), (1, 200), 16_384), 32_000, 2_048),
        (workload(400, (1, 40), (1, 200), 256, prefix_tokens=2_000), 8_192, 512),
        (workload(400, (1, 40), (1, 200), 256, prefix_tokens=6_000), 8_192, 512),
    ],
)
@pytest.mark.parametrize("policy", ["density_matched", "dual_scan"])
def test_room_is_not_kept_where_it_is_worth_more_than_balance(
    policy, requests, kv_tokens, max_num_batched_tokens
):
    limits = EngineLimits(16, kv_tokens // 16, 64, max_num_batched_tokens)
    assert simulated_s(policy, *requests, limits) < 1.1 * simulated_s("dfs", *requests, limits)
