"""The planner against plain twins, over jobs that hypothesis makes up.

Without deadlines: the first call compiles.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from blend_core.annotation import TreeCosts, annotate
from blend_core.output_length import estimate_output_lengths
from blend_core.performance import compute_s, memory_s, practical_optimum_s
from blend_core.plan import Plan
from blend_core.planner import PLANNED_POLICIES, PlanConfig, build_plan
from blend_core.prefix_tree import PrefixTree, build_prefix_tree
from blend_core.request import RequestArrays
from blend_core.specs import load_device_profile, model_spec_preset
from blend_core.transform import LayerWiseSort, order_by_density

MODEL = model_spec_preset("llama-3.1-8b")
DEVICE = load_device_profile("a100-80g")

few_tokens = st.lists(st.sampled_from([0, 1, 2, 300, 70_000]), min_size=1, max_size=9)
block_sizes = st.sampled_from([1, 2, 3])


@st.composite
def jobs(draw: st.DrawFn, least: int = 1) -> RequestArrays:
    """Prompts over few tokens, so that they share, repeat and begin one another."""
    prompts = draw(st.lists(few_tokens, min_size=least, max_size=25))
    n = len(prompts)
    upper = np.array(draw(st.lists(st.integers(1, 500), min_size=n, max_size=n)), dtype=np.int32)
    preset = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=np.bool_)
    offsets = np.zeros(n + 1, dtype=np.int64)
    np.cumsum([len(prompt) for prompt in prompts], out=offsets[1:])
    return RequestArrays(
        seq=np.array(draw(st.permutations(range(n))), dtype=np.int64),
        token_ids=np.array([token for prompt in prompts for token in prompt], dtype=np.int32),
        offsets=offsets,
        min_tokens=np.where(preset, upper, 0).astype(np.int32),
        max_tokens=upper,
    )


def prompts_of(requests: RequestArrays) -> list[tuple[int, ...]]:
    bounds = requests.offsets.tolist()
    return [tuple(requests.token_ids[a:b].tolist()) for a, b in pairwise(bounds)]


def plain_shared(left: tuple[int, ...], right: tuple[int, ...], block_size: int) -> int:
    """Whole blocks that an engine can take over from `left` for `right`."""
    common = 0
    while common < min(len(left), len(right) - 1) and left[common] == right[common]:
        common += 1
    return common // block_size * block_size


def plain_nodes(ordered: list[tuple[int, ...]], shared: list[int]) -> set[tuple[int, int, int]]:
    """(depth, first leaf, end) of every inner node: maximal runs of leaves that share so much."""
    nodes = {(0, 0, len(ordered))}
    for depth in set(shared) - {0}:
        start = 0
        for place in range(1, len(ordered) + 1):
            if place == len(ordered) or shared[place] < depth:
                if place - start > 1 and min(shared[start + 1 : place]) == depth:
                    nodes.add((depth, start, place))
                start = place
    return nodes


@settings(deadline=None)
@given(jobs(), block_sizes)
def test_tree_equals_its_plain_twin(requests: RequestArrays, block_size: int) -> None:
    tree = build_prefix_tree(requests, block_size)
    tree.check_integrity()
    prompts, seqs = prompts_of(requests), requests.seq.tolist()
    order = sorted(range(len(prompts)), key=lambda row: (prompts[row], seqs[row]))
    assert tree.leaf_row.tolist() == order
    ordered = [prompts[row] for row in order]
    shared = [plain_shared(a, b, block_size) for a, b in zip([(), *ordered], ordered, strict=False)]
    assert tree.num_shared_tokens.tolist() == shared
    nodes = zip(tree.depth.tolist(), tree.leaf_start.tolist(), tree.leaf_end.tolist(), strict=True)
    assert set(nodes) == plain_nodes(ordered, shared)


@settings(deadline=None)
@given(jobs(), block_sizes)
def test_tree_gives_every_prompt_back(requests: RequestArrays, block_size: int) -> None:
    tree = build_prefix_tree(requests, block_size)
    prompts = prompts_of(requests)
    for leaf, row in enumerate(tree.leaf_row.tolist()):
        node = int(tree.leaf_parent[leaf])
        segments = [prompts[row][tree.depth[node] :]]
        while node > 0:
            # A segment is what any leaf of the node has there.
            above = int(tree.parent[node])
            other = prompts[tree.leaf_row[tree.leaf_start[node]]]
            segments.append(other[tree.depth[above] : tree.depth[node]])
            node = above
        assert sum(reversed(segments), ()) == prompts[row]


@settings(deadline=None)
@given(jobs(), block_sizes)
def test_shared_and_unique_tokens_are_all_tokens(requests: RequestArrays, block_size: int) -> None:
    tree = build_prefix_tree(requests, block_size)
    own = tree.num_prompt_tokens - tree.depth[tree.leaf_parent]
    segments = tree.depth[1:] - tree.depth[tree.parent[1:]]
    assert own.sum() + segments.sum() + tree.total_shared_tokens == len(requests.token_ids)


@settings(deadline=None)
@given(jobs(), block_sizes)
def test_root_sums_equal_those_of_the_leaves_in_order(requests: RequestArrays, block_size: int) -> None:
    tree = build_prefix_tree(requests, block_size)
    lengths = estimate_output_lengths(requests, tree)
    annotation = annotate(tree, TreeCosts.of(tree, lengths, MODEL, DEVICE))
    mean, second_moment = lengths.mean[tree.leaf_row], lengths.second_moment[tree.leaf_row]
    compute = compute_s(MODEL, DEVICE, tree.num_prompt_tokens, mean, tree.num_shared_tokens).sum()
    memory = memory_s(MODEL, DEVICE, tree.num_prompt_tokens, mean, second_moment).sum()
    assert np.isclose(annotation.compute_s[len(tree)], compute)
    assert np.isclose(annotation.memory_s[len(tree)], memory)


@settings(deadline=None)
@given(jobs(), block_sizes)
def test_layer_wise_sort_equals_its_plain_twin(requests: RequestArrays, block_size: int) -> None:
    tree = build_prefix_tree(requests, block_size)
    costs = TreeCosts.of(tree, estimate_output_lengths(requests, tree), MODEL, DEVICE)
    annotation = annotate(tree, costs)
    n, falling = len(tree), (-annotation.density).tolist()

    def plain_leaves(node: int) -> list[int]:
        """Leaves below a node, children by density; leaves without a token of their own first."""
        children = []
        for leaf in np.flatnonzero(tree.leaf_parent == node).tolist():
            is_whole = tree.num_prompt_tokens[leaf] == tree.depth[node]
            children.append((-np.inf if is_whole else falling[leaf], leaf, [leaf]))
        for child in np.flatnonzero(tree.parent == node).tolist():
            children.append((falling[n + child], int(tree.leaf_start[child]), plain_leaves(child)))
        return [leaf for _, _, leaves in sorted(children) for leaf in leaves]

    places = LayerWiseSort(tree, costs).places(annotation)
    expected = plain_leaves(0)
    assert np.argsort(places[:n]).tolist() == expected
    for node in range(tree.num_nodes):
        assert expected[places[n + node]] == plain_leaves(node)[0]


def leaf_order(tree: PrefixTree, requests: RequestArrays, kept: float) -> np.ndarray:
    lengths = estimate_output_lengths(requests, tree)
    return tree.leaf_row[order_by_density(tree, lengths, MODEL, DEVICE, kept)]


@settings(deadline=None)
@given(jobs(), block_sizes, st.sampled_from([1.0, 0.99, 0.8, 0.5, 0.0]))
def test_order_is_a_permutation_that_keeps_its_sharing(
    requests: RequestArrays, block_size: int, kept: float
) -> None:
    tree = build_prefix_tree(requests, block_size)
    order = leaf_order(tree, requests, kept)
    assert sorted(order.tolist()) == list(range(len(requests)))
    shared = requests.shared_with_previous(order, block_size).sum()
    assert kept * tree.total_shared_tokens <= shared + 1e-9
    # Depth-first order is the best there is.
    assert shared <= tree.total_shared_tokens


@settings(max_examples=40, deadline=None)
@given(jobs(), st.sampled_from(PLANNED_POLICIES), block_sizes, st.randoms(use_true_random=False))
def test_shuffled_input_gives_the_same_plan(
    requests: RequestArrays, policy: str, block_size: int, random: object
) -> None:
    rows = list(range(len(requests)))
    random.shuffle(rows)  # type: ignore[attr-defined]
    config = PlanConfig(policy, block_size)
    plan = build_plan(requests, MODEL, DEVICE, config)
    plan.check_integrity()
    shuffled = requests.take(np.array(rows, dtype=np.int64))
    assert build_plan(shuffled, MODEL, DEVICE, config).to_arrow() == plan.to_arrow()
    assert Plan.from_arrow(plan.to_arrow()).summary == plan.summary


@settings(deadline=None)
@given(jobs(least=2), st.dictionaries(st.integers(0, 24), st.integers(1, 500), min_size=1, max_size=8))
def test_estimates_keep_to_bounds_and_moments(requests: RequestArrays, samples: dict[int, int]) -> None:
    samples = {
        seq: min(length, int(requests.max_tokens[requests.seq == seq].max(initial=1)))
        for seq, length in samples.items()
    }
    lengths = estimate_output_lengths(requests, build_prefix_tree(requests, 1), samples)
    assert (lengths.mean >= 1).all()
    assert (lengths.mean <= requests.max_tokens).all()
    assert (lengths.second_moment >= lengths.mean**2).all()
    assert (lengths.second_moment <= requests.max_tokens.astype(np.float64) ** 2).all()


@settings(deadline=None)
@given(jobs(least=2), st.dictionaries(st.integers(0, 30), st.integers(1, 500), max_size=8))
def test_estimates_equal_their_plain_twin(requests: RequestArrays, samples: dict[int, int]) -> None:
    tree = build_prefix_tree(requests, 1)
    lengths = estimate_output_lengths(requests, tree, samples)
    seqs, upper, lower = requests.seq.tolist(), requests.max_tokens.tolist(), requests.min_tokens.tolist()
    told = {
        row: samples[seq]
        for row, seq in enumerate(seqs)
        if seq in samples and lower[row] < upper[row] and upper[row] > 1
    }
    elsewhere = [length for seq, length in samples.items() if seq not in seqs]
    for leaf, row in enumerate(tree.leaf_row.tolist()):
        if seqs[row] in samples or lower[row] >= upper[row] or upper[row] == 1:
            continue
        least = max(lower[row], 1)
        if not told and not elsewhere:
            assert lengths.mean[row] == (least + upper[row]) / 2
            continue
        node, alike = int(tree.leaf_parent[leaf]), list[int]()
        while node > 0 and not alike:
            below = tree.leaf_row[tree.leaf_start[node] : tree.leaf_end[node]].tolist()
            alike = [told[other] for other in below if other in told]
            node = int(tree.parent[node])
        alike = alike or [told[other] for other in told if upper[other] == upper[row]]
        alike = alike or [*told.values(), *elsewhere]
        squares = [length**2 for length in alike]
        assert np.isclose(lengths.mean[row], np.clip(np.mean(alike), least, upper[row]))
        assert np.isclose(
            lengths.second_moment[row],
            max(np.clip(np.mean(squares), least**2, upper[row] ** 2), lengths.mean[row] ** 2),
        )


@settings(deadline=None)
@given(jobs(), block_sizes)
def test_optimum_is_a_bound_for_overlap_at_peak(requests: RequestArrays, block_size: int) -> None:
    tree = build_prefix_tree(requests, block_size)
    output = requests.max_tokens[tree.leaf_row]
    tokens = (tree.num_prompt_tokens, tree.num_shared_tokens, output)
    optimum = practical_optimum_s(MODEL, DEVICE, *tokens)
    compute = compute_s(MODEL, DEVICE, tree.num_prompt_tokens, output, tree.num_shared_tokens).sum()
    memory = memory_s(MODEL, DEVICE, tree.num_prompt_tokens, output).sum()
    assert optimum >= max(compute, memory)
    roomier = replace(DEVICE, kv_capacity_bytes=2 * DEVICE.kv_capacity_bytes)
    assert practical_optimum_s(MODEL, roomier, *tokens) <= optimum
