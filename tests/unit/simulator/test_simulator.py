"""A simulated run: what it costs, what it shares, and that no order beats the bound."""

from dataclasses import replace

import numpy as np
import pytest

from blend_core.errors import PlanError
from blend_core.performance import StepTimeModel, practical_optimum_s
from blend_core.planner import PlanConfig, build_plan
from blend_core.policies.base import EngineLimits
from blend_core.policies.factory import POLICY_NAMES
from blend_core.request import RequestArrays
from blend_core.simulator import NUM_PROGRESS_POINTS, simulate, with_simulation
from blend_core.specs import load_device_profile, model_spec_preset

MODEL = model_spec_preset("llama-3.1-8b")
DEVICE = load_device_profile("a100-80g")
BLOCK_SIZE = 16
NUM_BLOCKS = int(DEVICE.kv_capacity_bytes / MODEL.kv_bytes_per_token / BLOCK_SIZE)
LIMITS = EngineLimits(BLOCK_SIZE, NUM_BLOCKS, 4_096, 2_048)


def arrays(prompts, output_tokens):
    lengths = [len(prompt) for prompt in prompts]
    return RequestArrays(
        seq=np.arange(len(prompts), dtype=np.int64),
        token_ids=np.concatenate(prompts).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        min_tokens=np.array(output_tokens, dtype=np.int32),
        max_tokens=np.array(output_tokens, dtype=np.int32),
    )


def mixed(num_long, num_short, seed=0):
    """A few long answers to short prompts, many short answers to prompts with a long common beginning."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, 1_000, 400) for _ in range(5)]
    prompts = [rng.integers(0, 1_000, 100) for _ in range(num_long)]
    prompts += [np.concatenate([stems[i % 5], rng.integers(0, 1_000, 80)]) for i in range(num_short)]
    output_tokens = [*rng.integers(1_000, 4_000, num_long), *rng.integers(1, 8, num_short)]
    return arrays(prompts, output_tokens), np.array(output_tokens)


def planned(requests, policy):
    return build_plan(requests, MODEL, DEVICE, PlanConfig(policy, BLOCK_SIZE))


def run(requests, output_tokens, policy, *, limits=LIMITS, overlap=True):
    plan = planned(requests, policy)
    return simulate(requests, output_tokens, plan, policy, MODEL, DEVICE, limits, overlap=overlap)


def test_one_request_takes_a_prefill_and_its_decode_steps():
    requests = arrays([np.arange(3_000)], [3])
    result = run(requests, [3], "fcfs", overlap=False)
    steps = [
        (2_048, 2_048**2, 0),
        (952, 3_000**2 - 2_048**2, 0),
        (1, 0, 3_001),
        (1, 0, 3_002),
    ]
    assert result.num_steps == 4
    assert result.duration_s == pytest.approx(
        sum(StepTimeModel.of(MODEL, DEVICE).step_s(*step, overlap=False) for step in steps)
    )


def test_windows_name_what_was_computed():
    requests = arrays([np.arange(3_000)], [3])
    (window,) = run(requests, [3], "fcfs").windows
    assert (window.num_prefill_tokens, window.num_decode_tokens) == (3_000, 2)
    assert (window.prefill_tokens_sq, window.decode_kv_tokens) == (3_000**2, 3_001 + 3_002)
    assert window.duration_s == pytest.approx(window.predicted_s)


def test_equal_prompts_are_computed_once_but_for_their_last_block():
    requests = arrays([np.arange(160)] * 3, [4, 4, 4])
    result = run(requests, [4, 4, 4], "dfs")
    assert result.num_cached_tokens == 2 * 144
    assert result.prefix_sharing == pytest.approx(288 / 480)


@pytest.mark.parametrize(("num_blocks", "num_cached_tokens"), [(4, 0), (5, 16), (6, 32), (7, 48), (8, 48)])
def test_the_end_of_a_prefix_is_evicted_first(num_blocks, num_cached_tokens):
    stem, other = np.arange(64), np.arange(100, 164)
    requests = arrays([stem, other, stem], [1, 1, 1])
    few = EngineLimits(BLOCK_SIZE, num_blocks, 1, 2_048)
    assert run(requests, [1, 1, 1], "fcfs", limits=few).num_cached_tokens == num_cached_tokens


def test_depth_first_order_reaches_the_best_sharing():
    requests, output_tokens = mixed(5, 200)
    plan = planned(requests, "dfs")
    result = run(requests, output_tokens, "dfs")
    assert result.prefix_sharing == pytest.approx(plan.summary.prefix_sharing_best)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_no_run_beats_the_practical_optimum(policy):
    requests, output_tokens = mixed(200, 2_000)
    plan = planned(requests, policy)
    shared = requests.num_prompt_tokens * plan.summary.prefix_sharing_best
    bound = practical_optimum_s(MODEL, DEVICE, requests.num_prompt_tokens, shared, output_tokens)
    overlapped = run(requests, output_tokens, policy)
    sequential = run(requests, output_tokens, policy, overlap=False)
    assert bound <= overlapped.duration_s <= sequential.duration_s
    assert overlapped.num_output_tokens == output_tokens.sum()


def test_little_memory_preempts_and_reports_recomputation_apart():
    requests, output_tokens = mixed(40, 100)
    few = EngineLimits(BLOCK_SIZE, 1_000, 4_096, 2_048)
    result = run(requests, output_tokens, "random", limits=few)
    assert result.num_preempted > 0
    assert result.num_recomputed_tokens > 0
    assert result.prefix_sharing <= planned(requests, "dfs").summary.prefix_sharing_best
    assert max(window.kv_usage for window in result.windows) <= 1


def test_the_same_run_twice_is_the_same():
    requests, output_tokens = mixed(20, 200)
    first, second = (run(requests, output_tokens, "dual_scan") for _ in range(2))
    assert first.windows == second.windows


def test_true_lengths_are_hidden_from_the_policy():
    requests, output_tokens = mixed(20, 200)
    result = run(requests, np.full(len(output_tokens), 5), "dual_scan")
    assert result.num_output_tokens == 5 * len(output_tokens)


def test_a_request_larger_than_the_cache_is_refused_and_the_rest_runs():
    requests = arrays([np.arange(10), np.arange(100), np.arange(10)], [4, 4, 200])
    few = EngineLimits(BLOCK_SIZE, 5, 8, 2_048)
    result = run(requests, [4, 4, 200], "fcfs", limits=few)
    assert result.num_refused == 2
    assert result.num_output_tokens == 4


def test_a_plan_for_other_requests_is_refused():
    requests, output_tokens = mixed(2, 2)
    other = replace(planned(requests, "dfs"), seq=np.array([0, 1, 2, 9]))
    with pytest.raises(PlanError, match="not given"):
        simulate(requests, output_tokens, other, "dfs", MODEL, DEVICE, LIMITS, overlap=True)


def test_a_simulated_plan_tells_its_duration_and_density_as_work_gets_done():
    requests, output_tokens = mixed(100, 2_000)
    plan = planned(requests, "dual_scan")
    result = simulate(requests, output_tokens, plan, "dual_scan", MODEL, DEVICE, LIMITS, overlap=True)
    simulated = with_simulation(plan, result)
    assert simulated.summary.estimated_duration_s == result.duration_s
    assert simulated.progress[0] == 0
    assert simulated.progress[-1] == 1
    assert (np.diff(simulated.progress) > 0).all()
    assert len(simulated.progress) == len(simulated.planned_density) <= NUM_PROGRESS_POINTS + 2
    assert np.isfinite(simulated.planned_density).all()
    # Shares of work weigh densities: compute is density / (1 + density) of each.
    middle = simulated.planned_density[1:-1]
    compute_share = np.mean(middle / (1 + middle))
    assert compute_share == pytest.approx(result.compute_s / (result.compute_s + result.memory_s), rel=0.02)
    assert (simulated.seq == plan.seq).all()


def test_a_plan_that_reads_no_kv_has_no_density_curve():
    requests = arrays([np.arange(40), np.arange(50)], [1, 1])
    plan = planned(requests, "dfs")
    result = simulate(requests, [1, 1], plan, "dfs", MODEL, DEVICE, LIMITS, overlap=True)
    simulated = with_simulation(plan, result)
    assert len(simulated.progress) == len(simulated.planned_density) == 0
    assert simulated.summary.estimated_duration_s == result.duration_s
