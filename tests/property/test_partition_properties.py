"""Shards of a plan: every request once, equal work, little sharing lost."""

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blend_core.errors import PlanError
from blend_core.partition import CUT_SLACK, partition, rank_positions, sub_plan
from blend_core.plan import Plan
from blend_core.planner import PLANNED_POLICIES, PlanConfig, build_plan
from blend_core.segment_requests import SegmentRequests
from blend_core.specs import load_device_profile, model_spec_preset
from blend_core.studies.mixes import Setting, build_workload, paper_mix

MODEL = model_spec_preset("llama-3.1-8b")
DEVICE = load_device_profile("a100-80g")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of prompts behind one of four prefixes, with answers of every length."""
    num = draw(st.integers(1, 60))
    group = np.array(draw(st.lists(st.integers(0, 3), min_size=num, max_size=num)))
    output = np.array(draw(st.lists(st.integers(1, 3000), min_size=num, max_size=num)), dtype=np.int32)
    requests = SegmentRequests(
        seq=np.arange(num),
        segment_ids=np.stack([group, 4 + np.arange(num)], axis=1).ravel(),
        segment_tokens=np.stack([100 + 160 * group, np.full(num, 30)], axis=1).ravel(),
        offsets=2 * np.arange(num + 1),
        min_tokens=output,
        max_tokens=output,
    )
    policy = draw(st.sampled_from(PLANNED_POLICIES))
    return build_plan(requests, MODEL, DEVICE, PlanConfig(policy, 16))


@settings(deadline=None)
@given(plans(), st.integers(1, 5), st.integers(1, 4))
def test_a_partition_names_every_request_once_in_shards_of_equal_work(
    plan: Plan, num_ranks: int, shards_per_rank: int
) -> None:
    shards = partition(plan, num_ranks, shards_per_rank)
    assert [shard.index for shard in shards] == list(range(num_ranks * shards_per_rank))
    assert np.bincount([shard.rank for shard in shards]).tolist() == [shards_per_rank] * num_ranks
    for start in range(0, len(shards), num_ranks):
        assert sorted(shard.rank for shard in shards[start : start + num_ranks]) == list(range(num_ranks))
    assert np.array_equal(np.sort(np.concatenate([s.positions for s in shards])), np.arange(len(plan)))
    work = plan.compute_s + plan.memory_s
    share = work.sum() / len(shards)
    for shard in shards:
        off = abs(work[shard.positions].sum() - share)
        assert off <= 4 * CUT_SLACK * share + 4 * work.max()


@settings(deadline=None)
@given(plans(), st.integers(1, 4), st.integers(1, 3))
def test_parts_of_a_plan_are_sound_and_lose_one_path_per_cut_at_most(
    plan: Plan, num_ranks: int, shards_per_rank: int
) -> None:
    shards = partition(plan, num_ranks, shards_per_rank)
    parts = [rank_positions(shards, rank) for rank in range(num_ranks)]
    kept = 0
    for positions in parts:
        if len(positions):
            part = sub_plan(plan, positions, MODEL, DEVICE, 2048)
            part.check_integrity()
            assert part.seq.tolist() == plan.seq[positions].tolist()
            kept += int(part.num_shared_tokens.sum())
    lost = int(plan.num_shared_tokens.sum()) - kept
    # Two cuts for each shard but the last, which has its middle in one piece.
    assert 0 <= lost <= 2 * (len(shards) - 1) * int(plan.num_shared_tokens.max())


def test_ranks_of_a_paper_trace_get_the_same_time_and_density_and_keep_their_sharing() -> None:
    setting = Setting(MODEL, DEVICE, block_size=16, hours=2.0)
    requests = build_workload(paper_mix(None, "trace-1", 1.4, 0.35), setting, 0).requests
    plan = build_plan(requests, MODEL, DEVICE, PlanConfig("dual_scan", 16))
    shards = partition(plan, num_ranks=4, shards_per_rank=8)
    parts = [sub_plan(plan, rank_positions(shards, rank), MODEL, DEVICE, 2048) for rank in range(4)]
    for part in parts:
        assert part.compute_s.sum() == pytest.approx(plan.compute_s.sum() / 4, rel=0.01)
        assert part.memory_s.sum() == pytest.approx(plan.memory_s.sum() / 4, rel=0.01)
    kept = sum(int(part.num_shared_tokens.sum(dtype=np.int64)) for part in parts)
    assert kept > 0.9999 * plan.num_shared_tokens.sum(dtype=np.int64)
    # No rank has all of the longest answers, which are at the right end.
    longest = [part.estimated_output_tokens.max() for part in parts]
    assert min(longest) > 0.6 * max(longest)


@pytest.mark.parametrize("density", [1.4, 0.9])
def test_ranks_are_even_in_compute_and_memory_though_one_answer_is_a_third_of_a_shard(density: float) -> None:
    setting = Setting(MODEL, DEVICE, block_size=16, hours=2.0)
    workload = build_workload(paper_mix(None, "few-long", density, 0.05), setting, 0)
    config = PlanConfig("dual_scan", 16)
    first = build_plan(workload.requests, MODEL, DEVICE, config)
    samples = {seq: int(workload.num_output_tokens[seq]) for seq in first.seq[first.lead].tolist()}
    plan = build_plan(workload.requests, MODEL, DEVICE, config, samples, 1)
    shards = partition(plan, num_ranks=4, shards_per_rank=8)
    assert plan.memory_s.max() > 0.3 * plan.memory_s.sum() / len(shards)
    for work_s in (plan.compute_s, plan.memory_s):
        of_ranks = [work_s[rank_positions(shards, rank)].sum() for rank in range(4)]
        assert max(of_ranks) < 1.02 * min(of_ranks)


def test_the_part_of_all_requests_is_the_plan() -> None:
    requests = build_workload(
        paper_mix(None, "trace-2", 0.9, 0.35, preset=False), Setting(MODEL, DEVICE, 16, hours=0.2), 0
    ).requests
    # So few tokens a step that they decide how many steps the optimum has.
    plan = build_plan(requests, MODEL, DEVICE, PlanConfig("dfs", 16, max_num_batched_tokens=16))
    whole = sub_plan(plan, np.arange(len(plan)), MODEL, DEVICE, 16)
    assert np.array_equal(whole.compute_s, plan.compute_s)
    assert asdict(whole.summary) == pytest.approx(asdict(plan.summary))
    larger_steps = sub_plan(plan, np.arange(len(plan)), MODEL, DEVICE, 2048)
    assert larger_steps.summary.optimum_s < 0.9 * plan.summary.optimum_s


def test_cuts_move_to_the_borders_of_prefix_groups() -> None:
    # A thousand groups of ten: one hundredth of a shard holds more than one of them.
    num = 10_000
    group = np.repeat(np.arange(1000), 10)
    output = (2 + group).astype(np.int32)
    requests = SegmentRequests(
        seq=np.arange(num),
        segment_ids=np.stack([group, 1000 + np.arange(num)], axis=1).ravel(),
        segment_tokens=np.tile([512, 64], num),
        offsets=2 * np.arange(num + 1),
        min_tokens=output,
        max_tokens=output,
    )
    plan = build_plan(requests, MODEL, DEVICE, PlanConfig("dual_scan", 16))
    for shard in partition(plan, 2, 2):
        part = sub_plan(plan, shard.positions, MODEL, DEVICE, 2048)
        assert len(part) % 10 == 0
        assert part.num_shared_tokens.sum() == 512 * 9 * len(part) // 10


def test_no_rank_and_no_request_are_refused() -> None:
    requests = SegmentRequests(
        seq=np.arange(1),
        segment_ids=np.arange(1),
        segment_tokens=np.array([5]),
        offsets=np.array([0, 1]),
        min_tokens=np.ones(1, dtype=np.int32),
        max_tokens=np.ones(1, dtype=np.int32),
    )
    plan = build_plan(requests, MODEL, DEVICE, PlanConfig("dfs", 16))
    assert [len(shard) for shard in partition(plan, 2, 2)].count(1) == 1
    with pytest.raises(PlanError, match="at least one rank"):
        partition(plan, 0, 1)
    with pytest.raises(PlanError, match="empty shards"):
        sub_plan(plan, np.empty(0, dtype=np.int64), MODEL, DEVICE, 2048)
