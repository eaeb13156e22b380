"""Annotation, layer-wise sort and node split on jobs with a known best order."""

from collections.abc import Callable

import numpy as np
import pytest

from blend_core.annotation import TreeCosts, annotate
from blend_core.output_length import estimate_output_lengths
from blend_core.performance import compute_s, memory_s
from blend_core.prefix_tree import PrefixTree, build_prefix_tree
from blend_core.request import RequestArrays
from blend_core.specs import DeviceProfile, ModelSpec
from blend_core.transform import LayerWiseSort, order_by_density

MakeRequests = Callable[..., RequestArrays]


def planned(
    requests: RequestArrays, tree: PrefixTree, model: ModelSpec, device: DeviceProfile, kept: float
) -> list[int]:
    lengths = estimate_output_lengths(requests, tree)
    return tree.leaf_row[order_by_density(tree, lengths, model, device, kept)].tolist()


def test_a_shared_segment_is_counted_once(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    requests = make_requests([[1] * 32 + [2] * 8, [1] * 32 + [3] * 8, [4] * 20], max_tokens=[5, 50, 500])
    tree = build_prefix_tree(requests, 16)
    costs = TreeCosts.of(tree, estimate_output_lengths(requests, tree), llama_8b, a100)
    annotation = annotate(tree, costs)
    root, node = len(tree), len(tree) + 1
    expected = compute_s(llama_8b, a100, 40, 5) + compute_s(llama_8b, a100, 40, 50, 32)
    assert annotation.compute_s[node] == pytest.approx(expected)
    assert annotation.compute_s[root] == pytest.approx(expected + compute_s(llama_8b, a100, 20, 500))
    memory = memory_s(llama_8b, a100, [40, 40, 20], [5, 50, 500])
    assert annotation.memory_s[root] == pytest.approx(memory.sum())
    ratio = annotation.compute_s[root] / annotation.memory_s[root]
    assert annotation.density[root] == pytest.approx(ratio)


def test_children_fall_in_density_at_every_node(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    prompts = [[1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 2], [3]]
    requests = make_requests(prompts, max_tokens=[90, 5, 4, 3, 30])
    tree = build_prefix_tree(requests, 1)
    costs = TreeCosts.of(tree, estimate_output_lengths(requests, tree), llama_8b, a100)
    annotation = annotate(tree, costs)
    places = LayerWiseSort(tree, costs).places(annotation)[: len(tree)]
    assert tree.leaf_row[np.argsort(places)].tolist() == [4, 3, 2, 1, 0]


def test_a_prompt_that_begins_others_stays_before_them(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    # Request 0 is the least dense, but after request 1 its one block would have to be computed again.
    requests = make_requests([[1, 2], [1, 2, 3, 4]], max_tokens=[500, 2])
    tree = build_prefix_tree(requests, 2)
    order = planned(requests, tree, llama_8b, a100, 1.0)
    assert order == [0, 1]
    assert requests.shared_with_previous(np.array(order), 2).sum() == tree.total_shared_tokens


def groups_with_outliers(make_requests: MakeRequests) -> RequestArrays:
    """Twenty groups of short answers, each with one long answer; beside them prompts of every density."""
    prompts, outputs = [], []
    for group in range(20):
        for i in range(50):
            prompts.append([1000 + group] * 160 + [group, i] * 8)
            outputs.append(2 if i else 3000)
    for i in range(200):
        prompts.append([i] * 200)
        outputs.append(4 + 10 * i)
    return make_requests(prompts, max_tokens=outputs)


def weighted_inversions(
    requests: RequestArrays, order: list[int], model: ModelSpec, device: DeviceProfile
) -> float:
    """Share of work pairs that stand in the wrong order of density."""
    p, d = requests.num_prompt_tokens[order], requests.max_tokens[order]
    memory = memory_s(model, device, p, d)
    density, work = compute_s(model, device, p, d) / memory, memory
    wrong = np.triu(density[:, None] < density[None, :], 1)
    return float(work @ wrong @ work / work.sum() ** 2)


def test_split_brings_order_within_its_budget(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    requests = groups_with_outliers(make_requests)
    tree = build_prefix_tree(requests, 16)
    inversions = {}
    for kept in (1.0, 0.99, 0.9):
        order = planned(requests, tree, llama_8b, a100, kept)
        assert sorted(order) == list(range(len(requests)))
        shared = requests.shared_with_previous(np.array(order), 16).sum()
        assert shared >= kept * tree.total_shared_tokens
        inversions[kept] = weighted_inversions(requests, order, llama_8b, a100)
    assert inversions[0.9] < inversions[0.99] < inversions[1.0]
    assert inversions[0.9] < 0.1 * inversions[1.0]


def test_no_sharing_is_spent_where_all_is_in_order(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    # All prompts begin alike and each is alone behind that: sorting children needs no split.
    requests = make_requests([[7] * 64 + [i] * 30 for i in range(100)], max_tokens=list(range(1, 101)))
    tree = build_prefix_tree(requests, 16)
    order = planned(requests, tree, llama_8b, a100, 0.5)
    assert order == list(range(100))
    assert requests.shared_with_previous(np.array(order), 16).sum() == tree.total_shared_tokens
