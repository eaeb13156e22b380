"""Which hidden requests are one kind, which of them are sampled, and how like ones are mixed."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from blend_core.length_groups import (
    MAX_NUM_GROUPS,
    MIN_GROUP_SIZE,
    MIN_SUBTREE_SIZE,
    choose_group_samples,
    group_requests,
    mix_alike,
)
from blend_core.output_length import MIN_NUM_SAMPLES, preset_lengths
from blend_core.planner import PlanConfig, build_plan
from blend_core.prefix_tree import build_prefix_tree
from blend_core.segment_requests import SegmentRequests
from blend_core.specs import DeviceProfile, ModelSpec

BLOCK_SIZE = 16
Row = tuple[list[tuple[int, int]], int, int]


def requests_of(rows: Sequence[Row]) -> SegmentRequests:
    """Requests of (path of (segment, tokens), least, most output tokens)."""
    paths = [path for path, _, _ in rows]
    return SegmentRequests(
        seq=np.arange(len(rows)),
        segment_ids=np.array([segment for path in paths for segment, _ in path], dtype=np.int64),
        segment_tokens=np.array([tokens for path in paths for _, tokens in path], dtype=np.int64),
        offsets=np.cumsum([0, *map(len, paths)], dtype=np.int64),
        min_tokens=np.array([least for _, least, _ in rows], dtype=np.int32),
        max_tokens=np.array([most for _, _, most in rows], dtype=np.int32),
    )


def alone(num: int, prompt: int = 100, bound: int = 512, first: int = 0, least: int = 0) -> list[Row]:
    return [([(first + number, prompt)], least, bound) for number in range(num)]


def template(num: int, stem: int, bound: int = 512, first: int = 0) -> list[Row]:
    return [([(stem, 160), (first + number, 40)], 0, bound) for number in range(num)]


def groups_of(requests: SegmentRequests) -> np.ndarray:
    tree = build_prefix_tree(requests, BLOCK_SIZE)
    nothing_told = np.full(len(requests), -1, dtype=np.int64)
    return group_requests(requests, tree, ~preset_lengths(requests), nothing_told)


def members(requests: SegmentRequests) -> set[frozenset[int]]:
    group = groups_of(requests)
    return {frozenset(requests.seq[group == number].tolist()) for number in set(group.tolist()) - {-1}}


def mixture(seed: int = 0) -> SegmentRequests:
    """Templates large and small, bounds, short and long prompts, preset ones; in random order."""
    rows = [
        *template(MIN_SUBTREE_SIZE + 40, stem=-1),
        *template(MIN_SUBTREE_SIZE, stem=-2, bound=64, first=2_000),
        *template(MIN_SUBTREE_SIZE // 2, stem=-3, first=4_000),
        *alone(MIN_GROUP_SIZE, prompt=2_000, first=6_000),
        *alone(3 * MIN_GROUP_SIZE, prompt=50, first=7_000),
        *alone(10, prompt=9_000, first=8_000),
        *alone(30, prompt=80, bound=99, first=9_000),
        *alone(50, first=10_000, least=512),
        *alone(5, first=11_000, bound=1),
    ]
    order = np.random.default_rng(seed).permutation(len(rows))
    return requests_of([rows[place] for place in order])


def test_every_hidden_request_is_of_one_kind_and_none_that_is_preset() -> None:
    requests = mixture()
    group = groups_of(requests)
    is_preset = preset_lengths(requests)
    assert (group[is_preset] == -1).all()
    assert sorted(set(group[~is_preset].tolist())) == list(range(group.max() + 1))


def test_kinds_do_not_mix_bounds() -> None:
    requests = mixture()
    group = groups_of(requests)
    for number in range(group.max() + 1):
        assert len(set(requests.max_tokens[group == number].tolist())) == 1


def test_a_large_template_is_a_kind_and_a_small_one_goes_by_prompt_length() -> None:
    requests = mixture()
    group = groups_of(requests)
    stems = requests.segment_ids[requests.offsets[:-1]]
    assert len(set(group[stems == -1].tolist())) == 1
    assert (stems[group == group[stems == -1][0]] == -1).all()
    small, alike = group[stems == -3], group[requests.num_prompt_tokens == 2_000]
    assert len(set(small.tolist())) == len(set(alike.tolist())) == 1
    assert small[0] != alike[0]


def test_few_prompts_of_a_length_join_others_of_their_bound() -> None:
    requests = requests_of([*alone(100), *alone(10, prompt=9_000, first=500), *alone(7, prompt=3, first=800)])
    group = groups_of(requests)
    assert len(set(group.tolist())) == 2
    assert len(set(group[100:].tolist())) == 1


def test_the_order_of_rows_decides_nothing() -> None:
    requests = mixture()
    shuffled = requests.take(np.random.default_rng(5).permutation(len(requests)))
    assert members(shuffled) == members(requests)


def test_shuffled_input_gives_the_same_plan(llama_8b: ModelSpec, a100: DeviceProfile) -> None:
    config = PlanConfig("density_matched", BLOCK_SIZE, seed=3)
    requests = mixture()
    plan = build_plan(requests, llama_8b, a100, config)
    for seed in range(3):
        shuffled = requests.take(np.random.default_rng(seed).permutation(len(requests)))
        assert build_plan(shuffled, llama_8b, a100, config).to_arrow() == plan.to_arrow()


def test_another_seed_samples_others(llama_8b: ModelSpec, a100: DeviceProfile) -> None:
    plans = [
        build_plan(mixture(), llama_8b, a100, PlanConfig("density_matched", BLOCK_SIZE, seed))
        for seed in (0, 1)
    ]
    leads = [set(plan.seq[plan.lead].tolist()) for plan in plans]
    assert leads[0] != leads[1]


def test_there_are_never_too_many_kinds_of_templates() -> None:
    rows = [
        row for stem in range(300) for row in template(MIN_SUBTREE_SIZE, -1 - stem, first=10_000 * (stem + 1))
    ]
    assert groups_of(requests_of(rows)).max() < MAX_NUM_GROUPS


def test_bounds_that_all_differ_are_few_kinds() -> None:
    rows = [([(number, 100 + number)], 0, 8_000 - number) for number in range(3_000)]
    requests = requests_of(rows)
    group = groups_of(requests)
    assert 0 <= group.min() <= group.max() < MAX_NUM_GROUPS
    for number in range(group.max() + 1):
        bounds = requests.max_tokens[group == number]
        assert bounds.max() < 2 * bounds.min()


def test_a_kind_of_several_bounds_has_the_largest(llama_8b: ModelSpec, a100: DeviceProfile) -> None:
    requests = requests_of([([(number, 100)], 0, 8_000 - number) for number in range(1_000)])
    plan = build_plan(requests, llama_8b, a100, PlanConfig("density_matched", BLOCK_SIZE))
    assert (plan.max_tokens <= np.array([g.max_tokens for g in plan.length_groups])[plan.length_group]).all()
    assert plan.lead.sum() < len(plan) / 4


def test_one_request_is_a_kind() -> None:
    assert groups_of(requests_of(alone(1))).tolist() == [0]


def test_without_hidden_lengths_there_is_no_kind(llama_8b: ModelSpec, a100: DeviceProfile) -> None:
    requests = requests_of(alone(20, least=512))
    assert groups_of(requests).tolist() == [-1] * 20
    plan = build_plan(requests, llama_8b, a100, PlanConfig("density_matched", BLOCK_SIZE))
    assert plan.length_groups == ()
    assert not plan.lead.any()


def samples_by_group(group: np.ndarray, fraction: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Chosen places in the tree and the kind of each, for kinds given leaf by leaf."""
    requests = requests_of(alone(len(group)))
    tree = build_prefix_tree(requests, BLOCK_SIZE)
    chosen = choose_group_samples(tree, group, fraction, seed, 10**9)
    place_of = {seq: place for place, seq in enumerate(tree.seq.tolist())}
    places = np.array([place_of[seq] for seq in chosen.tolist()], dtype=np.int64)
    assert len(set(places.tolist())) == len(places)
    return places, group[places]


@pytest.mark.parametrize(
    ("sizes", "fraction", "expected"),
    [
        ((10_000,), 0.01, [100]),
        ((64,), 0.01, [1]),
        ((1_000,), 0.9, [250]),
        ((4,), 0.01, [1]),
        # A small kind gives the least, or a quarter of itself.
        ((20_000, 200, 40), 0.01, [200, MIN_NUM_SAMPLES, 10]),
        # The least is such that it comes to no more than all shares do.
        ((1_000, 100), 0.01, [10, 5]),
        ((100, 100, 100, 100), 0.01, [1, 1, 1, 1]),
    ],
)
def test_a_kind_gives_its_share_but_the_least_and_a_quarter_at_most(
    sizes: tuple[int, ...], fraction: float, expected: list[int]
) -> None:
    group = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.full(500, -1)])
    _, kinds = samples_by_group(group, fraction)
    assert np.bincount(kinds).tolist() == expected
    assert (kinds >= 0).all()


def test_every_kind_is_sampled_and_known_lengths_are_not() -> None:
    group = np.random.default_rng(0).choice([-1, 0, 1, 2], size=18_000, p=[0.4, 0.05, 0.05, 0.5])
    _, kinds = samples_by_group(group, 0.01)
    numbers, counts = np.unique(kinds, return_counts=True)
    assert numbers.tolist() == [0, 1, 2]
    assert counts.tolist() == [32, 32, math.ceil(0.01 * (group == 2).sum())]


def test_a_sample_leaves_a_dear_prefix_to_those_that_share_it() -> None:
    # In lexical order pairs behind a long prefix and requests that are alone take turns.
    rows: list[Row] = []
    for number in range(0, 3_000, 10):
        rows += [([(number, 5_120), (number + own, 40)], 0, 512) for own in (1, 2)]
        rows.append(([(number + 3, 100)], 0, 512))
    requests = requests_of(rows)
    tree = build_prefix_tree(requests, BLOCK_SIZE)
    group = np.zeros(len(rows), dtype=np.int64)
    is_alone = tree.leaf_parent == 0
    assert is_alone.sum() == 300

    def chosen(dear_prefix_tokens: int) -> np.ndarray:
        return np.isin(tree.seq, choose_group_samples(tree, group, 0.1, 0, dear_prefix_tokens))

    assert chosen(5_120)[is_alone].sum() == chosen(5_120).sum() == 90
    assert chosen(6_000)[is_alone].sum() < 45
    assert (chosen(6_000) == chosen(10**9)).all()


def test_samples_are_spread_over_their_kind() -> None:
    places, _ = samples_by_group(np.zeros(6_400, dtype=np.int64), 0.005)
    assert np.unique(places // 200).tolist() == list(range(32))


@pytest.mark.parametrize("fraction", [0.0, -1.0])
def test_a_fraction_of_nothing_samples_none(fraction: float) -> None:
    places, _ = samples_by_group(np.zeros(100, dtype=np.int64), fraction)
    assert len(places) == 0


def test_nothing_hidden_is_nothing_to_sample() -> None:
    places, _ = samples_by_group(np.full(100, -1), 0.01)
    assert len(places) == 0


def test_mixing_moves_only_those_alone_and_only_within_their_kind() -> None:
    generator = np.random.default_rng(1)
    order = generator.permutation(500)
    kind, is_alone = generator.integers(-1, 3, 500), generator.random(500) < 0.7
    mixed = mix_alike(order, kind, is_alone, seed=4)
    assert sorted(mixed.tolist()) == list(range(500))
    assert (kind[mixed] == kind[order]).all()
    stays = ~is_alone[order] | (kind[order] < 0)
    assert (mixed[stays] == order[stays]).all()
    assert (mixed[~stays] != order[~stays]).mean() > 0.9
    assert (mix_alike(order, kind, is_alone, seed=4) == mixed).all()
    assert (mix_alike(order, kind, is_alone, seed=5) != mixed).any()


def test_with_nobody_alike_the_order_stays() -> None:
    order = np.arange(10)[::-1].copy()
    everyone = np.ones(10, dtype=np.bool_)
    assert (mix_alike(order, np.full(10, -1), everyone, 0) == order).all()
    assert (mix_alike(order, np.arange(10), everyone, 0) == order).all()
    assert (mix_alike(order, np.zeros(10, dtype=np.int64), ~everyone, 0) == order).all()
