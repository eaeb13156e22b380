"""Plans that are simulated as a whole, in a sample, or on several replicas."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from blend_core.errors import PlanError
from blend_core.partition import SHARDS_PER_RANK, partition, rank_positions, sub_plan
from blend_core.performance import memory_s
from blend_core.prefix_tree import build_prefix_tree
from blend_core.request import RequestArrays
from blend_core.simulator import simulate
from flows.dry_run.forecast import FORECAST_POLICIES, forecast
from flows.dry_run.histogram import MAX_NUM_BINS, density_bins
from flows.dry_run.lengths import lengths_by_bounds
from flows.dry_run.sampling import sample_positions
from flows.dry_run.target import Target
from flows.dry_run.workload import SimulationSize, Workload, requests_that_fit

MakeWorkload = Callable[..., Workload]


def silent(text: str) -> None:
    pass


@pytest.mark.parametrize("policy", FORECAST_POLICIES)
def test_a_sample_is_a_rising_part_of_about_the_size_asked_for(workload: MakeWorkload, policy: str) -> None:
    plan = workload(3_000).plan(policy)
    places = sample_positions(plan, 700)
    assert np.all(np.diff(places) > 0)
    assert 0 <= places[0] < places[-1] < 3_000
    assert 400 <= len(places) <= 900
    assert np.array_equal(sample_positions(plan, 3_000), np.arange(3_000))


@pytest.mark.parametrize("policy", FORECAST_POLICIES)
def test_a_sample_has_the_density_of_the_whole(workload: MakeWorkload, policy: str) -> None:
    plan = workload(3_000).plan(policy)
    places = sample_positions(plan, 700)
    whole = plan.compute_s.sum() / plan.memory_s.sum()
    assert plan.compute_s[places].sum() / plan.memory_s[places].sum() == pytest.approx(whole, rel=0.2)


@pytest.mark.parametrize("policy", FORECAST_POLICIES)
def test_a_sample_tells_the_duration_of_the_whole(workload: MakeWorkload, policy: str) -> None:
    whole = workload(6_000)
    sampled = workload(6_000, size=SimulationSize(max_num_requests=5_000, num_sampled=2_000))
    plan = whole.plan(policy)
    expected, found = whole.simulate(plan, silent), sampled.simulate(plan, silent)
    assert expected.num_simulated == 6_000
    assert found.num_simulated < 3_000
    assert found.duration_s == pytest.approx(expected.duration_s, rel=0.15)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", FORECAST_POLICIES)
def test_a_sample_takes_the_steps_of_a_long_answer_once(
    few_long: MakeWorkload, policy: str, overlap: bool
) -> None:
    # Eight answers of 2,000 steps: of the whole and of each sample they are most of the time.
    whole = few_long(8_000, 8, 2_000, is_preset=True, overlap=overlap)
    sampled = replace(whole, size=SimulationSize(max_num_requests=5_000, num_sampled=2_000))
    plan = whole.plan(policy)
    expected, found = whole.simulate(plan, silent), sampled.simulate(plan, silent)
    assert found.num_simulated < 3_000
    assert found.duration_s == pytest.approx(expected.duration_s, rel=0.1)


@pytest.mark.parametrize("policy", FORECAST_POLICIES)
def test_one_answer_that_decides_is_in_every_sample(few_long: MakeWorkload, policy: str) -> None:
    whole = few_long(8_000, 1, 20_000, is_preset=True)
    sampled = replace(whole, size=SimulationSize(max_num_requests=5_000, num_sampled=2_000))
    plan = whole.plan(policy)
    expected, found = whole.simulate(plan, silent), sampled.simulate(plan, silent)
    assert found.num_simulated < 3_000
    assert found.duration_s == pytest.approx(expected.duration_s, rel=0.08)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", FORECAST_POLICIES)
def test_a_sample_tells_the_duration_of_what_many_at_once_decode(
    few_long: MakeWorkload, a100: Target, policy: str, overlap: bool
) -> None:
    # KV would hold ten times the 64 answers of 100 steps that are decoded at once.
    few_at_once = replace(a100, limits=replace(a100.limits, max_num_seqs=64))
    whole = replace(few_long(0, 6_000, 100, is_preset=True, overlap=overlap), target=few_at_once)
    sampled = replace(whole, size=SimulationSize(max_num_requests=5_000, num_sampled=2_000))
    plan = whole.plan(policy)
    expected, found = whole.simulate(plan, silent), sampled.simulate(plan, silent)
    assert found.num_simulated < 3_000
    assert found.duration_s == pytest.approx(expected.duration_s, rel=0.05)


def test_preemptions_of_a_sample_are_its_own(workload: MakeWorkload, a100: Target) -> None:
    tight = replace(a100, limits=replace(a100.limits, num_blocks=400))
    load = replace(
        workload(3_000), target=tight, size=SimulationSize(max_num_requests=2_000, num_sampled=1_500)
    )
    plan = load.plan("fcfs")
    longest = load.lengths.actual[plan.seq].argmax()
    places = np.union1d(sample_positions(plan, 1_500), [longest])
    model, device, limits = tight.model, tight.device, tight.limits
    part = sub_plan(plan, places, model, device, limits.max_num_batched_tokens)
    rows = np.sort(part.seq)
    alone = simulate(
        load.requests.take(rows),
        load.lengths.actual[rows],
        part,
        "fcfs",
        model,
        device,
        limits,
        overlap=False,
    )
    assert load.simulate(plan, silent).num_preempted == alone.num_preempted > 0


@pytest.mark.parametrize("policy", ["density_matched", "dfs"])
@pytest.mark.parametrize("num_replicas", [8, 40])
def test_of_many_requests_the_slowest_replica_is_found_by_the_lengths_that_will_be(
    few_long: MakeWorkload, policy: str, num_replicas: int
) -> None:
    all_replicas = few_long(4_000, 60, 4_096, is_preset=False)
    some_replicas = replace(all_replicas, size=SimulationSize(num_sampled=2_000))
    plan = all_replicas.plan(policy)
    slowest = all_replicas.simulate_replicas(plan, num_replicas, silent)
    found = some_replicas.simulate_replicas(plan, num_replicas, silent)
    assert 0.98 * slowest.duration_s <= found.duration_s <= slowest.duration_s


@pytest.mark.parametrize("max_num_seqs", [4, 1024])
def test_of_many_requests_the_replica_with_most_work_is_simulated_and_that_with_the_longest_answer(
    few_long: MakeWorkload, a100: Target, max_num_seqs: int
) -> None:
    # Four at once take as long as all of their tokens do, 1,024 at once as long as the longest answer does.
    target = replace(a100, limits=replace(a100.limits, max_num_seqs=max_num_seqs))
    all_replicas = replace(few_long(0, 64, 300, is_preset=False), target=target)
    some_replicas = replace(all_replicas, size=SimulationSize(num_sampled=50))
    plan = all_replicas.plan("dfs")
    shards = partition(plan, 3, SHARDS_PER_RANK)
    answers = [all_replicas.lengths.actual[plan.seq[rank_positions(shards, rank)]] for rank in range(3)]
    most, longest = (int(np.argmax([length(one) for one in answers])) for length in (np.sum, np.max))
    assert most != longest
    slowest = all_replicas.simulate_replicas(plan, 3, silent)
    assert some_replicas.simulate_replicas(plan, 3, silent) == slowest


def test_replicas_share_the_time(workload: MakeWorkload) -> None:
    load = workload(3_000)
    plan = load.plan("dual_scan")
    alone, shared = load.simulate(plan, silent), load.simulate_replicas(plan, 3, silent)
    assert alone.duration_s / 3 <= shared.duration_s * 1.02
    assert shared.duration_s < 0.6 * alone.duration_s


def test_a_forecast_has_every_policy_and_no_duration_under_the_optimum(workload: MakeWorkload) -> None:
    told = forecast(workload(3_000, overlap=True), "dfs", None, silent)
    assert tuple(entry.policy for entry in told.policies) == FORECAST_POLICIES
    assert told.expected.policy == "dfs"
    assert told.summary.estimated_duration_s == told.expected.estimated_duration_s
    assert all(0 < entry.fraction_of_optimum <= 1.02 for entry in told.policies)
    assert told.deadline is None


def test_a_forecast_says_how_far_each_simulation_is(workload: MakeWorkload) -> None:
    told: list[str] = []
    forecast(workload(1_200), "dfs", None, told.append)
    for policy in FORECAST_POLICIES:
        assert f"planning for {policy}" in told
        assert f"{policy}: 1,000 of 1,200 requests simulated" in told


def test_progress_of_replicas_is_that_of_one_of_them(workload: MakeWorkload) -> None:
    told: list[str] = []
    load = workload(1_200)
    alone_s = load.simulate(load.plan("dfs"), silent).duration_s
    forecast(load, "dfs", alone_s * 0.9, told.append)
    of_replicas = [text for text in told if "replicas: " in text]
    assert of_replicas
    assert all(text.startswith("one of 2 replicas: 500 of ") for text in of_replicas)


def test_overlap_is_never_slower(workload: MakeWorkload) -> None:
    in_sequence = forecast(workload(1_500), "dual_scan", None, silent)
    overlapped = forecast(workload(1_500, overlap=True), "dual_scan", None, silent)
    for one, other in zip(in_sequence.policies, overlapped.policies, strict=True):
        assert other.estimated_duration_s < one.estimated_duration_s


def test_a_number_of_devices_that_is_told_is_in_time_and_one_replica_less_is_late(
    workload: MakeWorkload,
) -> None:
    load = workload(1_500)
    alone_s = load.simulate(load.plan("dual_scan"), silent).duration_s
    deadline = forecast(load, "dual_scan", alone_s * 0.6, silent).deadline
    assert deadline is not None
    assert deadline.num_replicas is not None
    assert deadline.num_replicas >= 2
    assert deadline.num_devices == deadline.num_replicas * load.target.tensor_parallel
    assert deadline.estimated_duration_s <= deadline.deadline_s
    late = load.simulate_replicas(load.plan("dual_scan"), deadline.num_replicas - 1, silent)
    assert deadline.num_replicas == 2 or late.duration_s > deadline.deadline_s


def test_histogram_bins_hold_every_request_once(workload: MakeWorkload) -> None:
    told = forecast(workload(600), "dual_scan", None, silent)
    bins = told.density_bins
    assert sum(entry.num_requests for entry in bins) == 600
    assert bins[0].low == 0
    assert bins[-1].high == float("inf")
    assert all(one.high == other.low for one, other in pairwise(bins))
    assert sum(entry.memory_s for entry in bins) == pytest.approx(told.summary.memory_s)
    dense = sum(entry.num_requests for entry in bins if entry.low >= 8)
    assert dense == 400, "the short answers, and only they"


@pytest.mark.parametrize("lowest", [-1.0, -2.5, -3.0, -6.0])
@pytest.mark.parametrize("highest", [0.0, 1.5, 15.0, 24.5])
def test_bins_break_at_one_where_requests_lie_on_both_sides(
    workload: MakeWorkload, lowest: float, highest: float
) -> None:
    load = workload(60)
    plan = load.plan("dfs")
    read_s = memory_s(
        load.target.model,
        load.target.device,
        plan.num_prompt_tokens,
        plan.estimated_output_tokens,
        plan.estimated_output_tokens_sq,
    )
    powers = np.linspace(lowest, highest, 60)
    bins = density_bins(replace(plan, compute_s=read_s * 2.0**powers * (1 + 1e-12)), load.target)
    assert len(bins) <= MAX_NUM_BINS
    assert 1.0 in [entry.low for entry in bins]
    assert sum(entry.num_requests for entry in bins if entry.low < 1) == (powers < 0).sum()


def test_one_density_is_one_story(mixed: Callable[..., RequestArrays], workload: MakeWorkload) -> None:
    told = forecast(workload(1), "fcfs", None, silent)
    assert [entry.num_requests for entry in told.density_bins if entry.num_requests] == [1]


def test_a_request_that_fits_to_the_token_is_kept(mixed: Callable[..., RequestArrays], a100: Target) -> None:
    # Of the last token nothing is kept: 50 of prompt and 335 of answer need 384 tokens, 24 blocks.
    requests = mixed(30, long_answer=335)
    tight = replace(a100, limits=replace(a100.limits, num_blocks=24))
    assert requests_that_fit(requests, tight) is requests
    longer = replace(requests, max_tokens=requests.max_tokens + 1)
    assert set(requests_that_fit(longer, tight).max_tokens.tolist()) == {5}


def test_an_answer_ends_with_the_context_of_the_model(
    mixed: Callable[..., RequestArrays], a100: Target
) -> None:
    requests = mixed(30, long_answer=10_000)
    tight = replace(a100, limits=replace(a100.limits, num_blocks=64))
    assert len(requests_that_fit(requests, tight)) == 20
    short = replace(tight, model=replace(tight.model, max_model_len=1025))
    assert requests_that_fit(requests, short) is requests


def test_requests_that_kv_never_holds_are_an_error(mixed: Callable[..., RequestArrays], a100: Target) -> None:
    tight = replace(a100, limits=replace(a100.limits, num_blocks=3))
    with pytest.raises(PlanError, match="more KV than a100-80g has; lower max_tokens"):
        requests_that_fit(mixed(30), tight)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_simulation_answers_every_request_that_fits(
    mixed: Callable[..., RequestArrays], a100: Target, overlap: bool
) -> None:
    requests = mixed(300, long_answer=335)
    requests = replace(requests, min_tokens=requests.max_tokens)
    tight = replace(a100, limits=replace(a100.limits, num_blocks=24))
    assert requests_that_fit(requests, tight) is requests
    tree = build_prefix_tree(requests, 16)
    lengths = lengths_by_bounds(requests, tree, np.random.default_rng(0))
    load = Workload(requests, tree, lengths, tight, overlap, SimulationSize())
    for policy in FORECAST_POLICIES:
        plan = load.plan(policy)
        ran = simulate(
            requests,
            lengths.actual,
            plan,
            policy,
            tight.model,
            tight.device,
            tight.limits,
            overlap=overlap,
        )
        assert ran.num_refused == 0
