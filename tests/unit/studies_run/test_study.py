"""A study runs every policy on the same requests and says how near each comes to the bound."""

import numpy as np
import pytest
from duration_bound import least_duration_s
from hypothesis import given, settings
from hypothesis import strategies as st

from blend_core.prefix_tree import build_prefix_tree
from blend_core.specs import load_device_profile, model_spec_preset
from blend_core.studies.study import (
    BLOCK_SIZE,
    STUDY_POLICIES,
    PolicyRun,
    mean_over_seeds,
    run_policy,
    run_workload,
    speedup,
    study_limits,
    timeline,
)

MODEL = model_spec_preset("llama-3.1-8b")
DEVICE = load_device_profile("a100-80g")


def test_the_setting_is_that_of_published_figures():
    limits = study_limits(MODEL, DEVICE)
    assert limits.num_blocks * limits.block_size == pytest.approx(60e9 / 131_072, abs=16)
    assert limits.max_num_batched_tokens == 2_048


def test_every_policy_is_compared_on_the_same_requests(make_workload):
    run = run_workload(make_workload(), MODEL, DEVICE, 0)
    assert tuple(run.policies) == STUDY_POLICIES
    assert run.length_set == "preset"
    for policy in run.policies.values():
        assert 0 < policy.fraction_of_optimum <= 1
        assert policy.duration_s * policy.fraction_of_optimum == pytest.approx(run.optimum_s)
        assert policy.sharing_kept <= 1.0 + 1e-9
    assert run.policies["dfs"].sharing_kept == pytest.approx(1.0)
    assert speedup(run.policies, "dfs", "dfs_sequential") > 1


def test_the_sequential_engine_takes_the_same_steps_one_part_after_the_other(make_workload):
    workload = make_workload()
    run = run_workload(workload, MODEL, DEVICE, 0, policies=("dfs_sequential", "dfs"))
    sequential, overlapped = run.policies["dfs_sequential"], run.policies["dfs"]
    assert sequential.num_steps == overlapped.num_steps
    assert sequential.compute_s == overlapped.compute_s
    assert overlapped.duration_s < sequential.duration_s < 2 * overlapped.duration_s


def test_hidden_lengths_leave_the_baselines_as_they_are(make_workload):
    preset = run_workload(make_workload(), MODEL, DEVICE, 0)
    told = []
    taken_over = run_workload(make_workload(preset=False), MODEL, DEVICE, 0, known=preset, told=told.append)
    assert told == ["small: dual_scan", "small: density_matched"]
    simulated = run_workload(make_workload(preset=False), MODEL, DEVICE, 0)
    assert taken_over == simulated
    assert simulated.length_set == "hidden"


def test_the_same_study_twice_is_the_same(make_workload):
    first, second = (run_workload(make_workload(), MODEL, DEVICE, 3) for _ in range(2))
    assert first == second


def test_means_over_seeds(make_workload):
    runs = [run_workload(make_workload(seed=seed), MODEL, DEVICE, seed, policies=("dfs",)) for seed in (0, 1)]
    mean = mean_over_seeds(runs)
    durations = [run.policies["dfs"].duration_s for run in runs]
    assert durations[0] != durations[1]
    assert mean.policies["dfs"].duration_s == pytest.approx(sum(durations) / 2)
    assert PolicyRun.mean([runs[0].policies["dfs"]]) == runs[0].policies["dfs"]


def test_a_time_line_holds_all_the_work(make_workload):
    result = run_policy(make_workload(), MODEL, DEVICE, "dual_scan", 0)
    line = timeline(result.windows)
    width = result.duration_s / len(line.time_s)
    assert sum(line.compute) * width == pytest.approx(result.compute_s)
    assert sum(line.memory) * width == pytest.approx(result.memory_s)
    assert 0 <= min(line.kv_usage) <= max(line.kv_usage) <= 1


@given(seed=st.integers(0, 1_000), longest=st.integers(4, 1_500), policy=st.sampled_from(STUDY_POLICIES[1:]))
@settings(max_examples=15, deadline=None)
def test_simulated_time_is_never_under_the_bound(make_workload_of, seed, longest, policy):
    workload = make_workload_of(num_chat=40, num_long=10, num_shared=60, seed=seed, longest=longest)
    requests = workload.requests
    tree = build_prefix_tree(requests, BLOCK_SIZE)
    shared = np.empty(len(requests), dtype=np.int64)
    shared[tree.leaf_row] = tree.num_shared_tokens
    result = run_policy(workload, MODEL, DEVICE, policy, 0)
    assert result.num_preempted == 0
    for overlap, duration_s in ((True, result.duration_s), (False, result.sequential_s)):
        bound_s = least_duration_s(
            MODEL,
            DEVICE,
            requests.num_prompt_tokens,
            shared,
            workload.num_output_tokens,
            block_size=BLOCK_SIZE,
            kv_capacity_tokens=study_limits(MODEL, DEVICE).num_blocks * BLOCK_SIZE,
            overlap=overlap,
        )
        assert duration_s >= bound_s * (1 - 1e-9)
