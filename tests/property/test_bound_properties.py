"""Simulated runs against the bound that none can beat."""

import numpy as np
from duration_bound import least_duration_s
from hypothesis import given, settings
from hypothesis import strategies as st

from blend_core.planner import PLANNED_POLICIES, PlanConfig, build_plan
from blend_core.policies.base import EngineLimits
from blend_core.prefix_tree import build_prefix_tree
from blend_core.request import RequestArrays
from blend_core.simulator import simulate
from blend_core.specs import load_device_profile, model_spec_preset

MODEL = model_spec_preset("llama-3.1-8b")
DEVICE = load_device_profile("a100-80g")
BLOCK_SIZE = 4


@st.composite
def jobs(draw: st.DrawFn) -> tuple[RequestArrays, np.ndarray]:
    """Prompts of a few blocks that share and repeat, with true output lengths, preset or within bounds."""
    piece = st.sampled_from([[1] * 4, [2] * 4, [3] * 40, [1, 2], [5]])
    pieces = draw(st.lists(st.lists(piece, min_size=1, max_size=4), min_size=1, max_size=12))
    prompts = [[token for part in parts for token in part] for parts in pieces]
    n = len(prompts)
    output = np.array(draw(st.lists(st.integers(1, 60), min_size=n, max_size=n)), dtype=np.int64)
    preset = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    return (
        RequestArrays(
            seq=np.arange(n),
            token_ids=np.array([token for prompt in prompts for token in prompt], dtype=np.int32),
            offsets=np.cumsum([0, *map(len, prompts)], dtype=np.int64),
            min_tokens=np.where(preset, output, 0).astype(np.int32),
            max_tokens=np.where(preset, output, 64).astype(np.int32),
        ),
        output,
    )


@settings(max_examples=300, deadline=None)
@given(
    jobs(),
    st.sampled_from(PLANNED_POLICIES),
    st.integers(60, 200),
    st.sampled_from([4, 16, 2048]),
    st.booleans(),
)
def test_no_simulated_run_beats_the_bound(
    job: tuple[RequestArrays, np.ndarray], policy: str, num_blocks: int, num_batched: int, overlap: bool
) -> None:
    requests, output = job
    plan = build_plan(requests, MODEL, DEVICE, PlanConfig(policy, BLOCK_SIZE))
    limits = EngineLimits(BLOCK_SIZE, num_blocks, max_num_seqs=64, max_num_batched_tokens=num_batched)
    result = simulate(requests, output, plan, policy, MODEL, DEVICE, limits, overlap=overlap)
    assert result.num_refused == 0
    tree = build_prefix_tree(requests, BLOCK_SIZE)
    bound = least_duration_s(
        MODEL,
        DEVICE,
        tree.num_prompt_tokens,
        tree.num_shared_tokens,
        output[tree.leaf_row],
        block_size=BLOCK_SIZE,
        kv_capacity_tokens=num_blocks * BLOCK_SIZE,
        max_num_batched_tokens=num_batched,
        overlap=overlap,
    )
    # A preemption saves one read of what the request holds, for which it computes it anew.
    longest = int((requests.num_prompt_tokens + output).max())
    read_s = longest * MODEL.kv_bytes_per_token / (0.8 * DEVICE.bandwidth_bytes_per_s)
    assert result.duration_s + result.num_preempted * read_s >= bound * (1 - 1e-9)


def test_a_lone_request_takes_the_bound_exactly() -> None:
    requests = RequestArrays(
        seq=np.arange(1),
        token_ids=np.arange(100, dtype=np.int32),
        offsets=np.array([0, 100]),
        min_tokens=np.zeros(1, dtype=np.int32),
        max_tokens=np.full(1, 64, dtype=np.int32),
    )
    plan = build_plan(requests, MODEL, DEVICE, PlanConfig("dfs", BLOCK_SIZE))
    limits = EngineLimits(BLOCK_SIZE, 1000, max_num_seqs=64, max_num_batched_tokens=2048)
    result = simulate(requests, [1], plan, "dfs", MODEL, DEVICE, limits, overlap=True)
    bound = least_duration_s(MODEL, DEVICE, [100], [0], [1], block_size=BLOCK_SIZE, kv_capacity_tokens=4000)
    assert np.isclose(result.duration_s, bound)
