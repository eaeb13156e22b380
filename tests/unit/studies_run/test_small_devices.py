"""Where KV is small and steps take as long whatever is in them, the default policy keeps up with `dfs`."""

from dataclasses import replace

import numpy as np
import pytest

from blend_core.planner import PlanConfig, build_plan
from blend_core.segment_requests import SegmentRequests
from blend_core.simulator import simulate
from blend_core.specs import load_device_profile, model_spec_preset
from blend_core.studies.study import BLOCK_SIZE, study_limits


def requests_of(prefixes, prefix_tokens, own, min_tokens, max_tokens):
    """Requests behind a prefix of that many tokens each, 0 for none, and with prompt tokens of their own."""
    names = 1_000_000 + np.arange(len(own))
    return SegmentRequests(
        seq=np.arange(len(own)),
        segment_ids=np.stack((np.where(prefix_tokens > 0, prefixes, -names), names), 1).ravel(),
        segment_tokens=np.stack((prefix_tokens, own), 1).ravel(),
        offsets=2 * np.arange(len(own) + 1),
        min_tokens=min_tokens.astype(np.int32),
        max_tokens=max_tokens.astype(np.int32),
    )


def duration_s(policy, requests, num_output_tokens, model, device):
    plan = build_plan(requests, model, device, PlanConfig(policy, BLOCK_SIZE, 0))
    limits = study_limits(model, device)
    return simulate(requests, num_output_tokens, plan, policy, model, device, limits, overlap=True).duration_s


@pytest.mark.parametrize("share_of_kv", [0.5, 0.8, 0.95])
def test_one_long_prompt_holds_nobody_up(share_of_kv):
    model, device = model_spec_preset("llama-3.1-8b"), load_device_profile("l4")
    num_kv_tokens = study_limits(model, device).num_blocks * BLOCK_SIZE
    own = np.append(np.full(300, 200), int(share_of_kv * num_kv_tokens))
    output = np.append(np.random.default_rng(0).integers(100, 600, 300), 20)
    nothing = np.zeros(301, dtype=np.int64)
    requests = requests_of(nothing, nothing, own, nothing, np.full(301, 1_024))
    alone_s = duration_s("dfs", requests, output, model, device)
    assert duration_s("density_matched", requests, output, model, device) < 1.25 * alone_s


def test_kv_is_filled_where_nothing_can_be_hidden():
    model, one = model_spec_preset("llama-3.1-70b"), load_device_profile("l4")
    device = replace(one.scaled(8), kv_capacity_bytes=83_536.0 * model.kv_bytes_per_token)
    generator = np.random.default_rng(0)
    is_long = generator.random(700) < 0.4
    prefix_tokens = np.where(is_long, 0, 608)
    own = np.where(is_long, generator.integers(30, 150, 700), generator.integers(1, 50, 700))
    output = np.where(is_long, generator.integers(200, 4_000, 700), generator.integers(1, 20, 700))
    requests = requests_of(
        generator.integers(0, 10, 700),
        prefix_tokens,
        own,
        np.where(is_long, output, 0),
        np.where(is_long, output, 64),
    )
    in_order_s = duration_s("dfs", requests, output, model, device)
    assert duration_s("density_matched", requests, output, model, device) < 1.05 * in_order_s
