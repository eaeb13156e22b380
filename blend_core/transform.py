"""From the prefix tree to an order whose density falls from left to right (BlendServe §5.2, appendix A.1).

1. *Annotate*: each node gets compute, memory and density of its leaves, its own segment counted once.
2. *Layer-wise sort*: at each node the children by density, largest first. Keeps all sharing.
3. *Node split*: children of a node whose density belongs elsewhere are cut from it and put under the root,
   where their prefix is computed anew. Children of like density leave together: then they pay for it once.

Splits are bought where they move the most work per recomputed token, until what is left is in order or the
budget, the share of sharing that may be lost, is spent. Each leaf moves at most once.
"""

from dataclasses import dataclass
from typing import Final

import numba
import numpy as np
import numpy.typing as npt

from blend_core.annotation import Annotation, Floats, Ints, TreeCosts, annotate
from blend_core.node_split import LeafWork, choose_runs
from blend_core.output_length import OutputLengths
from blend_core.performance import compute_density, compute_s, memory_s
from blend_core.prefix_tree import PrefixTree
from blend_core.specs import DeviceProfile, ModelSpec

MAX_ROUNDS: Final = 8
"""Rounds of splitting at most; the first one buys nearly everything."""


class LayerWiseSort:
    """Sorts the children of every node by density, largest first, as often as nodes change theirs.

    A leaf without tokens of its own stays first in its node: after a longer prompt it would have to compute
    one token, and with it a whole block, again. Ties keep lexical order.
    """

    __slots__ = ("_leaf_key", "_leaves", "_tree")

    def __init__(self, tree: PrefixTree, costs: TreeCosts) -> None:
        key = -compute_density(costs.leaf_compute_s, costs.leaf_memory_s)
        key[tree.num_prompt_tokens == tree.depth[tree.leaf_parent]] = -np.inf
        self._tree = tree
        self._leaf_key = key
        # Leaves never change their density, so they are sorted once and merged with the nodes each time.
        self._leaves = np.lexsort((key, tree.leaf_parent))

    @property
    def leaf_key(self) -> Floats:
        """`(num_requests,)` what siblings are sorted by, rising."""
        return self._leaf_key

    def places(self, annotation: Annotation) -> Ints:
        """Returns `(num_requests + num_nodes,)` the place of the first leaf of each item. Does not mutate."""
        tree = self._tree
        node_key = -annotation.density[len(tree) :]
        nodes = np.lexsort((tree.leaf_start[1:], node_key[1:], tree.parent[1:])) + 1
        return np.asarray(
            _places(
                self._leaves,
                self._leaf_key,
                tree.leaf_parent,
                nodes,
                node_key,
                tree.parent,
                tree.leaf_start,
                tree.leaf_end,
            ),
            dtype=np.int64,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """Runs that were cut off and now lie under the root, sorted by `key`.

    Attributes:
        key: `(num_runs,)` what they are sorted by: `-density`.
        num_leaves: `(num_runs,)`.
        leaves: leaves of all runs, run after run.
    """

    key: Floats
    num_leaves: Ints
    leaves: Ints

    @classmethod
    def none(cls) -> "_Runs":
        return cls(np.empty(0), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

    def joined(self, other: "_Runs") -> "_Runs":
        """Returns both together, sorted. Does not mutate."""
        key = np.concatenate((self.key, other.key))
        num_leaves = np.concatenate((self.num_leaves, other.num_leaves))
        starts = np.cumsum(num_leaves) - num_leaves
        by_key = np.argsort(key, kind="stable")
        num_leaves = num_leaves[by_key]
        gaps = np.repeat(starts[by_key] - (np.cumsum(num_leaves) - num_leaves), num_leaves)
        leaves = np.concatenate((self.leaves, other.leaves))[gaps + np.arange(len(gaps))]
        return _Runs(key[by_key], num_leaves, leaves)


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
    costs = TreeCosts.of(tree, lengths, model, device)
    work = LeafWork.of(tree, costs, top)
    layers = LayerWiseSort(tree, costs)
    child = _children_of(tree.parent, tree.leaf_parent, top)
    budget = (1.0 - sharing_kept) * tree.total_shared_tokens
    stays = np.ones(n, dtype=np.bool_)
    runs = _Runs.none()
    for num_rounds in range(MAX_ROUNDS + 1):
        annotation = annotate(tree, costs, stays)
        places = layers.places(annotation)
        order = _merged(_staying(places[:n], stays), child, layers.leaf_key, annotation, runs)
        # The cheapest split computes one block anew.
        if num_rounds == MAX_ROUNDS or budget < tree.block_size:
            break
        # What is spent counts, not what is lost by now: a run that still lies beside its old parent
        # may be parted from it by the next round.
        run, spent = choose_runs(tree, work, places, order, stays, top, budget)
        budget -= spent
        if spent == 0:
            break
        runs = runs.joined(_cut_off(tree, lengths, model, device, run, places, top))
        stays &= run < 0
    return order


def _staying(places: Ints, stays: npt.NDArray[np.bool_]) -> Ints:
    """Returns the leaves that have not been moved, by place."""
    leaf_at = np.empty(len(places), dtype=np.int64)
    leaf_at[places] = np.arange(len(places))
    return leaf_at[stays[leaf_at]]


def _cut_off(
    tree: PrefixTree,
    lengths: OutputLengths,
    model: ModelSpec,
    device: DeviceProfile,
    run: Ints,
    places: Ints,
    top: int,
) -> _Runs:
    """Returns the runs of one round; the first leaf of each computes its prefix below `top` anew."""
    leaves = np.flatnonzero(run >= 0)
    leaves = leaves[np.lexsort((places[leaves], run[leaves]))]
    is_first = np.diff(run[leaves], prepend=-1) != 0
    shared = _shared_in_tree_order(tree, leaves)
    shared[is_first] = tree.depth[top]
    firsts = np.flatnonzero(is_first)
    rows = tree.leaf_row[leaves]
    prompt, mean = tree.num_prompt_tokens[leaves], lengths.mean[rows]
    compute = np.add.reduceat(compute_s(model, device, prompt, mean, shared), firsts)
    memory = np.add.reduceat(memory_s(model, device, prompt, mean, lengths.second_moment[rows]), firsts)
    num_leaves = np.diff(np.append(firsts, len(leaves)))
    return _Runs.none().joined(_Runs(-compute_density(compute, memory), num_leaves, leaves))


def _merged(staying: Ints, child: Ints, leaf_key: Floats, annotation: Annotation, runs: _Runs) -> Ints:
    """Returns `(num_requests,)` leaves: the children of the top and the runs, both sorted, as one."""
    child_of = child[staying]
    starts = np.flatnonzero(np.diff(child_of, prepend=-1) != 0)
    items = child_of[starts]
    key = -annotation.density[items]
    is_leaf = items < len(leaf_key)
    key[is_leaf] = leaf_key[items[is_leaf]]
    before = np.append(starts, len(staying))[np.searchsorted(key, runs.key, side="right")]
    return np.insert(staying, np.repeat(before, runs.num_leaves), runs.leaves)


def _shared_in_tree_order(tree: PrefixTree, order: Ints) -> Ints:
    """Returns `(len(order),)` whole-block tokens that each leaf of `order` shares with its left one."""
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
def _children_of(parent: Ints, leaf_parent: Ints, top: int) -> Ints:
    """Returns `(num_requests,)` the child of `top` that holds each leaf, as an item number."""
    n = len(leaf_parent)
    child = np.empty(len(parent), dtype=np.int64)
    for node in range(len(parent)):
        child[node] = n + node if node <= top or parent[node] == top else child[parent[node]]
    of_leaf = np.empty(n, dtype=np.int64)
    for leaf in range(n):
        of_leaf[leaf] = leaf if leaf_parent[leaf] == top else child[leaf_parent[leaf]]
    return of_leaf


@numba.njit(cache=True, nogil=True)
def _places(
    leaves: Ints,
    leaf_key: Floats,
    leaf_parent: Ints,
    nodes: Ints,
    node_key: Floats,
    parent: Ints,
    leaf_start: Ints,
    leaf_end: Ints,
) -> Ints:
    """Merges the sorted leaves and nodes of each parent: an item is placed behind its earlier siblings."""
    n, m = len(leaves), len(nodes)
    place = np.zeros(n + m + 1, dtype=np.int64)
    i, j = 0, 0
    # Preorder: a parent is placed before its children.
    for above in range(m + 1):
        offset = place[n + above]
        while True:
            has_leaf = i < n and leaf_parent[leaves[i]] == above
            has_node = j < m and parent[nodes[j]] == above
            if has_leaf and has_node:
                leaf, node = leaves[i], nodes[j]
                takes_leaf = leaf_key[leaf] < node_key[node] or (
                    leaf_key[leaf] == node_key[node] and leaf < leaf_start[node]
                )
            elif has_leaf or has_node:
                takes_leaf = has_leaf
            else:
                break
            if takes_leaf:
                place[leaves[i]] = offset
                offset += 1
                i += 1
            else:
                node = nodes[j]
                place[n + node] = offset
                offset += leaf_end[node] - leaf_start[node]
                j += 1
    return place
