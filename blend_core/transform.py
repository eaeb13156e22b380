"""From the prefix tree to an order whose density falls from left to right (BlendServe §5.2, appendix A.1).

1. *Annotate*: each node gets compute, memory and density of its leaves, its own segment counted once.
2. *Layer-wise sort*: at each node the children by density, largest first. Keeps all sharing.
3. *Node split*: children of a node whose density belongs elsewhere are cut from it and put under the root,
   where their prefix is computed anew. Children of like density leave together: then they pay for it once.

Splits are bought where they move the most work per recomputed token, until what is left is in order or the
budget, the share of sharing that may be lost, is spent. Each leaf moves at most once.
"""

from typing import Final

import numba
import numpy as np

from blend_core.annotation import Annotation, Ints, annotate
from blend_core.node_split import choose_runs, leaf_work
from blend_core.output_length import OutputLengths
from blend_core.performance import compute_density, compute_s, memory_s
from blend_core.prefix_tree import PrefixTree
from blend_core.specs import DeviceProfile, ModelSpec

MAX_ROUNDS: Final = 8
"""Rounds of splitting at most; the first one buys nearly everything."""


def layer_wise_sort(tree: PrefixTree, annotation: Annotation) -> Ints:
    """Sorts the children of every node by density, largest first.

    Returns `(num_requests + num_nodes,)` the place of the first leaf of each item of the annotation.
    A leaf without tokens of its own stays first in its node: after a longer prompt it would have to compute
    one token, and with it a whole block, again. Ties keep lexical order.
    """
    n = len(tree)
    parent = np.concatenate((tree.leaf_parent, tree.parent))
    key = -annotation.density
    key[:n][tree.num_prompt_tokens == tree.depth[tree.leaf_parent]] = -np.inf
    first_leaf = np.concatenate((np.arange(n), tree.leaf_start))
    num_leaves = np.concatenate((np.ones(n, dtype=np.int64), tree.leaf_end - tree.leaf_start))
    return np.asarray(_places(np.lexsort((first_leaf, key, parent)), parent, num_leaves, n), dtype=np.int64)


def order_by_density(
    tree: PrefixTree,
    lengths: OutputLengths,
    model: ModelSpec,
    device: DeviceProfile,
    sharing_kept: float,
) -> Ints:
    """Returns `(num_requests,)` leaves ordered by layer-wise sort and node split, densest first.

    Neighbours of the order share at least `sharing_kept` of the tokens that they share in depth-first order.
    """
    n = len(tree)
    # Where all prompts begin alike, what they have in common is never recomputed: its node acts as the root.
    top = 1 if tree.num_nodes > 1 and tree.leaf_end[1] - tree.leaf_start[1] == n else 0
    work = leaf_work(tree, lengths, model, device, top)
    budget = (1.0 - sharing_kept) * tree.total_shared_tokens
    stays = np.ones(n, dtype=np.bool_)
    unit, rank = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    subtree = _subtrees(tree.parent, tree.leaf_parent, top)
    num_units = n + tree.num_nodes
    for num_rounds in range(MAX_ROUNDS + 1):
        places = layer_wise_sort(tree, annotate(tree, lengths, model, device, stays))
        unit[stays], rank[stays] = subtree[stays], places[:n][stays]
        order = _order_of_units(tree, lengths, model, device, unit, rank, top)
        if num_rounds == MAX_ROUNDS:
            break
        # What is spent counts, not what is lost by now: a run that still lies beside its old parent
        # may be parted from it by the next round.
        run, spent = choose_runs(tree, work, places, order, stays, top, budget)
        budget -= spent
        moves = run >= 0
        if not moves.any():
            break
        unit[moves], rank[moves] = num_units + run[moves], places[:n][moves]
        num_units += int(run.max()) + 1
        stays &= ~moves
    return order


def _order_of_units(
    tree: PrefixTree,
    lengths: OutputLengths,
    model: ModelSpec,
    device: DeviceProfile,
    unit: Ints,
    rank: Ints,
    top: int,
) -> Ints:
    """Returns `(num_requests,)` leaves: units by density, largest first, and by `rank` within a unit.

    A unit is a subtree of `top` or a run that was split off: what lies together under the root.
    """
    by_unit = np.lexsort((rank, unit))
    shared = _shared_in_tree_order(tree, by_unit)
    is_first = np.diff(unit[by_unit], prepend=-1) != 0
    shared[is_first] = 0
    rows = tree.leaf_row[by_unit]
    prompt, mean = tree.num_prompt_tokens[by_unit], lengths.mean[rows]
    firsts = np.flatnonzero(is_first)
    compute = np.add.reduceat(compute_s(model, device, prompt, mean, shared), firsts)
    memory = np.add.reduceat(memory_s(model, device, prompt, mean, lengths.second_moment[rows]), firsts)
    falling = -compute_density(compute, memory)
    first_leaf = by_unit[firsts]
    is_whole_top = (tree.leaf_parent[first_leaf] == top) & (prompt[firsts] == tree.depth[top])
    falling[is_whole_top] = -np.inf
    by_density = np.lexsort((np.minimum.reduceat(by_unit, firsts), falling))
    place = np.empty(len(firsts), dtype=np.int64)
    place[by_density] = np.arange(len(firsts))
    return by_unit[np.argsort(place[np.cumsum(is_first) - 1], kind="stable")]


def _shared_in_tree_order(tree: PrefixTree, order: Ints) -> Ints:
    """Returns `(num_requests,)` whole-block tokens that each leaf of `order` shares with its left one."""
    shared = _common_depths(order, tree.leaf_parent, tree.parent, tree.depth)
    own = tree.num_prompt_tokens[order] - 1
    return np.asarray(np.minimum(shared, own - own % tree.block_size), dtype=np.int64)


@numba.njit(cache=True, nogil=True)
def _common_depths(order: Ints, leaf_parent: Ints, parent: Ints, depth: Ints) -> Ints:
    shared = np.zeros(len(order), dtype=np.int64)
    for place in range(1, len(order)):
        left, right = leaf_parent[order[place - 1]], leaf_parent[order[place]]
        while left != right:
            # Preorder: the larger number cannot be an ancestor of the smaller.
            if left > right:
                left = parent[left]
            else:
                right = parent[right]
        shared[place] = depth[left]
    return shared


@numba.njit(cache=True, nogil=True)
def _subtrees(parent: Ints, leaf_parent: Ints, top: int) -> Ints:
    """Returns `(num_requests,)` the child of `top` that holds each leaf, as an item number."""
    n = len(leaf_parent)
    child = np.empty(len(parent), dtype=np.int64)
    for node in range(len(parent)):
        child[node] = n + node if node <= top or parent[node] == top else child[parent[node]]
    subtree = np.empty(n, dtype=np.int64)
    for leaf in range(n):
        subtree[leaf] = leaf if leaf_parent[leaf] == top else child[leaf_parent[leaf]]
    return subtree


@numba.njit(cache=True, nogil=True)
def _places(by_parent: Ints, parent: Ints, num_leaves: Ints, num_requests: int) -> Ints:
    """Turns the order of siblings into places: an item starts behind its earlier siblings."""
    place = np.zeros(len(parent), dtype=np.int64)
    offset, previous = 0, -1
    for item in by_parent:
        if parent[item] != previous:
            offset, previous = 0, parent[item]
        # The siblings of one parent come together and parents rise, so a parent is placed before its
        # children.
        if previous >= 0:
            place[item] = place[num_requests + previous] + offset
            offset += num_leaves[item]
    return place
