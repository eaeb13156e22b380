"""build_plan: orders, sums, samples, and the same plan from any input order."""

from collections.abc import Callable

import numpy as np
import pytest

from blend_core.errors import ConfigurationError, PlanError
from blend_core.performance import memory_s, practical_optimum_s
from blend_core.plan import Plan
from blend_core.planner import PLANNED_POLICIES, PlanConfig, build_plan
from blend_core.policies.factory import POLICY_NAMES
from blend_core.request import RequestArrays
from blend_core.specs import DeviceProfile, ModelSpec
from flows.job_parts import Policy

MakeRequests = Callable[..., RequestArrays]


def mixed_job(make_requests: MakeRequests, hidden: bool) -> RequestArrays:
    prompts, outputs = [], []
    for i in range(300):
        group = i % 3
        prompts.append([group] * (64 if group < 2 else 0) + [i, 5, i] * 7)
        outputs.append((2, 200, 1500)[group] + i)
    return make_requests(prompts, max_tokens=outputs, min_tokens=0 if hidden else None)


def plan_of(
    requests: RequestArrays, model: ModelSpec, device: DeviceProfile, policy: str, **options: float | int
) -> Plan:
    config = PlanConfig(policy, block_size=16, **options)  # type: ignore[arg-type]
    plan = build_plan(requests, model, device, config)
    plan.check_integrity()
    return plan


@pytest.mark.parametrize("policy", PLANNED_POLICIES)
@pytest.mark.parametrize("hidden", [False, True])
def test_shuffled_input_gives_the_same_bytes(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile, policy: str, hidden: bool
) -> None:
    requests = mixed_job(make_requests, hidden)
    shuffled = requests.take(np.random.default_rng(5).permutation(len(requests)))
    plans = [plan_of(one, llama_8b, a100, policy).to_arrow() for one in (requests, shuffled)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("policy", PLANNED_POLICIES)
def test_every_request_is_planned_once(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile, policy: str
) -> None:
    plan = plan_of(mixed_job(make_requests, True), llama_8b, a100, policy)
    assert sorted(plan.seq.tolist()) == list(range(300))
    assert (plan.policy, plan.revision) == (policy, 0)


def test_fcfs_keeps_the_order_of_the_job(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    requests = make_requests([[9], [1], [5]], seq=[4, 2, 8])
    assert plan_of(requests, llama_8b, a100, "fcfs").seq.tolist() == [2, 4, 8]


def test_dfs_shares_best_and_random_depends_on_its_seed(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    requests = mixed_job(make_requests, False)
    dfs = plan_of(requests, llama_8b, a100, "dfs").summary
    first, second = (plan_of(requests, llama_8b, a100, "random", seed=seed) for seed in (0, 1))
    assert dfs.prefix_sharing_planned == dfs.prefix_sharing_best > 0
    assert first.summary.prefix_sharing_planned < dfs.prefix_sharing_best
    assert first.seq.tolist() != second.seq.tolist()


def test_dual_scan_order_falls_in_density(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    plan = plan_of(mixed_job(make_requests, False), llama_8b, a100, "dual_scan")
    thirds = np.split(np.arange(300), 3)
    densities = [plan.compute_s[third].sum() / plan.memory_s[third].sum() for third in thirds]
    assert densities == sorted(densities, reverse=True)
    assert densities[0] > 3 * densities[2]
    assert plan.summary.prefix_sharing_planned >= 0.99 * plan.summary.prefix_sharing_best


def test_summary_sums_up_with_every_segment_once(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    requests = mixed_job(make_requests, False)
    plan = plan_of(requests, llama_8b, a100, "dfs")
    summary = plan.summary
    assert summary.compute_s == pytest.approx(plan.compute_s.sum())
    assert summary.memory_s == pytest.approx(plan.memory_s.sum())
    assert summary.density == pytest.approx(summary.compute_s / summary.memory_s)
    p, d = requests.num_prompt_tokens, requests.max_tokens
    assert summary.memory_s == pytest.approx(memory_s(llama_8b, a100, p, d).sum())
    assert summary.estimated_output_tokens == d.sum()
    assert summary.prefix_sharing_best == plan.num_shared_tokens.sum() / p.sum()
    planned_tokens = (plan.num_prompt_tokens, plan.num_shared_tokens, plan.max_tokens)
    assert summary.optimum_s == pytest.approx(practical_optimum_s(llama_8b, a100, *planned_tokens))
    for policy in PLANNED_POLICIES:
        other = plan_of(requests, llama_8b, a100, policy).summary
        assert (other.compute_s, other.optimum_s) == (summary.compute_s, summary.optimum_s)


def test_the_optimum_is_that_of_the_engine_s_largest_step(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    requests = make_requests([[i, 5, i] * 400 for i in range(40)], max_tokens=[2] * 40)
    small, large = (
        plan_of(requests, llama_8b, a100, "dfs", max_num_batched_tokens=tokens).summary.optimum_s
        for tokens in (512, 8192)
    )
    assert large < small


def test_hidden_lengths_make_a_few_requests_lead(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    hidden, preset = mixed_job(make_requests, True), mixed_job(make_requests, False)
    assert plan_of(hidden, llama_8b, a100, "dual_scan").lead.sum() == 32
    assert plan_of(hidden, llama_8b, a100, "dual_scan", sample_fraction=0.0).lead.sum() == 0
    assert plan_of(preset, llama_8b, a100, "dual_scan").lead.sum() == 0
    assert plan_of(hidden, llama_8b, a100, "dfs").lead.sum() == 0


def test_a_revision_leaves_finished_samples_out_and_learns_from_them(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    prompts = [[group] * 16 + [i] for group in range(3) for i in range(20)]
    requests = make_requests(prompts, max_tokens=1000, min_tokens=0)
    config = PlanConfig("dual_scan", block_size=16)
    plan = build_plan(requests, llama_8b, a100, config, samples={0: 4, 1: 6, 20: 900}, revision=1)
    plan.check_integrity()
    assert (plan.revision, len(plan), plan.lead.sum()) == (1, 57, 0)
    assert not {0, 1, 20} & set(plan.seq.tolist())
    estimates = dict(zip(plan.seq.tolist(), plan.estimated_output_tokens.tolist(), strict=True))
    assert {estimates[seq] for seq in range(2, 20)} == {5}
    assert {estimates[seq] for seq in range(21, 40)} == {900}
    assert {round(estimates[seq], 6) for seq in range(40, 60)} == {round(910 / 3, 6)}


def test_dual_scan_takes_mean_lengths_as_the_paper_does(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    requests = mixed_job(make_requests, True)
    literal, other = (plan_of(requests, llama_8b, a100, policy) for policy in ("dual_scan", "dfs"))
    mean = literal.estimated_output_tokens
    assert (literal.estimated_output_tokens_sq > mean * mean).any()
    expected = memory_s(llama_8b, a100, literal.num_prompt_tokens, mean)
    assert np.array_equal(literal.memory_s, expected)
    assert other.memory_s.sum() > 1.1 * literal.memory_s.sum()
    assert literal.summary.memory_s == other.summary.memory_s


def test_nothing_left_to_plan_is_an_error(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    config = PlanConfig("dfs", block_size=16)
    for requests, samples in ((make_requests([]), None), (make_requests([[1]]), {0: 3})):
        with pytest.raises(PlanError, match="nothing to run"):
            build_plan(requests, llama_8b, a100, config, samples=samples)


def test_every_policy_that_a_job_may_name_is_planned_for_and_made() -> None:
    assert {policy.value for policy in Policy} == set(PLANNED_POLICIES) == set(POLICY_NAMES)


def test_faulty_options_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="dual_scan"):
        PlanConfig("lifo", block_size=16)
    with pytest.raises(ConfigurationError, match="block_size"):
        PlanConfig("dfs", block_size=0)
    with pytest.raises(ConfigurationError, match="sharing_kept"):
        PlanConfig("dfs", block_size=16, sharing_kept=1.5)


def test_taken_rows_keep_their_prompts(make_requests: MakeRequests) -> None:
    requests = make_requests([[1], [2, 2], [3, 3, 3]], max_tokens=[1, 2, 3], min_tokens=0)
    taken = requests.take(np.array([2, 0]))
    assert taken.seq.tolist() == [2, 0]
    assert taken.token_ids.tolist() == [3, 3, 3, 1]
    assert taken.offsets.tolist() == [0, 3, 4]
    assert taken.max_tokens.tolist() == [3, 1]
    assert len(requests.take(np.array([], dtype=np.int64))) == 0
