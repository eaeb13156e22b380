"""The prefix tree on jobs small enough to draw."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from blend_core.errors import PlanError
from blend_core.prefix_tree import build_prefix_tree
from blend_core.request import RequestArrays

MakeRequests = Callable[..., RequestArrays]


def test_inner_nodes_are_the_common_prefixes(make_requests: MakeRequests) -> None:
    tree = build_prefix_tree(make_requests([[5, 1, 1], [5, 1, 2], [5, 9], [7]]), block_size=1)
    tree.check_integrity()
    assert tree.depth.tolist() == [0, 1, 2]
    assert tree.parent.tolist() == [-1, 0, 1]
    assert tree.leaf_parent.tolist() == [2, 2, 1, 0]
    assert tree.num_shared_tokens.tolist() == [0, 2, 1, 0]


def test_equal_prompts_share_all_but_one_token(make_requests: MakeRequests) -> None:
    tree = build_prefix_tree(make_requests([[1, 2, 3]] * 3), block_size=1)
    assert tree.num_shared_tokens.tolist() == [0, 2, 2]


def test_a_prompt_that_begins_another_is_shared_whole(make_requests: MakeRequests) -> None:
    tree = build_prefix_tree(make_requests([[1, 2, 3, 4], [1, 2, 3]]), block_size=1)
    tree.check_integrity()
    assert tree.leaf_row.tolist() == [1, 0]
    assert tree.num_shared_tokens.tolist() == [0, 3]


def test_only_whole_blocks_are_shared(make_requests: MakeRequests) -> None:
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [1, 2, 3, 9, 9, 9]]
    tree = build_prefix_tree(make_requests(prompts), block_size=4)
    tree.check_integrity()
    assert tree.num_shared_tokens.tolist() == [0, 4, 0]


def test_equal_prompts_of_whole_blocks_compute_their_last_block(make_requests: MakeRequests) -> None:
    tree = build_prefix_tree(make_requests([[1, 2, 3, 4]] * 2), block_size=2)
    assert tree.num_shared_tokens.tolist() == [0, 2]


def test_tokens_sort_as_numbers_beyond_one_byte(make_requests: MakeRequests) -> None:
    tree = build_prefix_tree(make_requests([[70_000], [256], [255], [3]]), block_size=1)
    assert tree.leaf_row.tolist() == [3, 2, 1, 0]


def test_equal_prompts_are_ordered_by_seq_whatever_the_rows(make_requests: MakeRequests) -> None:
    tree = build_prefix_tree(make_requests([[4], [4], [4]], seq=[30, 10, 20]), block_size=1)
    assert tree.seq.tolist() == [10, 20, 30]


@pytest.mark.parametrize("num_requests", [0, 1])
def test_smallest_jobs_have_a_tree(make_requests: MakeRequests, num_requests: int) -> None:
    tree = build_prefix_tree(make_requests([[1, 2]] * num_requests), block_size=16)
    tree.check_integrity()
    assert len(tree) == num_requests
    assert tree.num_nodes == 1


def test_damage_is_found(make_requests: MakeRequests) -> None:
    tree = build_prefix_tree(make_requests([[5, 1, 1], [5, 1, 2], [5, 9], [7]]), block_size=1)
    damaged = [
        replace(tree, leaf_row=np.array([0, 0, 1, 2])),
        replace(tree, parent=np.array([-1, 0, 2])),
        replace(tree, depth=np.array([0, 2, 2])),
        replace(tree, leaf_end=np.array([4, 2, 2])),
        replace(tree, num_shared_tokens=np.array([0, 2, 0, 0])),
        replace(tree, leaf_parent=np.array([2, 2, 2, 0])),
    ]
    for one in damaged:
        with pytest.raises(PlanError, match="damaged"):
            one.check_integrity()
