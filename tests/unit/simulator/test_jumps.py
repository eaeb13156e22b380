"""Steps that only decode are simulated in one go; single steps say the same."""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blend_core.planner import PlanConfig, build_plan
from blend_core.policies.base import EngineLimits
from blend_core.policies.factory import make_policy
from blend_core.request import RequestArrays
from blend_core.simulation.prompts import PromptBlocks
from blend_core.simulation.stepper import SimulatedEnd, Stepper
from blend_core.specs import load_device_profile, model_spec_preset

MODEL = model_spec_preset("llama-3.1-8b")
DEVICE = load_device_profile("a100-80g")


def windows_and_ends(requests, output_tokens, limits, *, jumps, overlap):
    plan = build_plan(requests, MODEL, DEVICE, PlanConfig("dual_scan", limits.block_size))
    policy = make_policy("dual_scan", plan, limits)
    if not jumps:
        policy.quiet_steps = lambda view: 1
    stepper = Stepper(
        requests.seq.tolist(),
        PromptBlocks.of(requests, limits.block_size),
        output_tokens,
        policy,
        MODEL,
        DEVICE,
        limits,
        revision=0,
        overlap=overlap,
        started_at=0.0,
    )
    events = []
    while not stepper.is_done:
        events += stepper.advance()
    events.append(stepper.flush())
    windows = [event for event in events if event is not None and not isinstance(event, SimulatedEnd)]
    ends = [event for event in events if isinstance(event, SimulatedEnd)]
    return windows, ends, (stepper.now, stepper.sequential_s)


@given(
    prompts=st.lists(st.integers(1, 80), min_size=1, max_size=8),
    outputs=st.lists(st.integers(1, 400), min_size=8, max_size=8),
    num_blocks=st.integers(30, 200),
    overlap=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_jumps_equal_single_steps(prompts, outputs, num_blocks, overlap):
    output_tokens = outputs[: len(prompts)]
    requests = RequestArrays(
        seq=np.arange(len(prompts)),
        token_ids=np.arange(sum(prompts), dtype=np.int32),
        offsets=np.concatenate(([0], np.cumsum(prompts))),
        min_tokens=np.zeros(len(prompts), dtype=np.int32),
        max_tokens=np.array([512] * len(prompts), dtype=np.int32),
    )
    limits = EngineLimits(4, num_blocks, 6, 64)
    first = windows_and_ends(requests, output_tokens, limits, jumps=True, overlap=overlap)
    second = windows_and_ends(requests, output_tokens, limits, jumps=False, overlap=overlap)
    assert len(first[0]) == len(second[0])
    for one, other in zip(first[0], second[0], strict=True):
        assert astuple(one) == pytest.approx(astuple(other), rel=1e-9)
    assert [end.row for end in first[1]] == [end.row for end in second[1]]
    assert [end.finished_at for end in first[1]] == pytest.approx([end.finished_at for end in second[1]])
    assert first[2] == pytest.approx(second[2], rel=1e-9)
