"""The prefix tree of a job's prompts in flat arrays (BlendServe §5.1).

The engine shares whole KV blocks, so the tree is over blocks: two prompts meet in an inner node only when
they have its blocks in common. Branches within a block make no node of their own: fewer, larger nodes, and no
sharing lost. With `block_size` 1 it is the paper's tree over tokens.

Building takes three passes: sort the prompts, compare neighbours, and read the tree of intervals off their
common prefix lengths with a stack.
"""

from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from blend_core.errors import PlanError
from blend_core.prompt_set import PromptSet


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """Inner nodes and leaves of a prefix tree.

    Leaves are requests in lexical order of their prompts, equal prompts by `seq`: a depth-first order. Nodes
    are numbered in preorder, node 0 is the root. A leaf hangs on the node that holds the longest prefix it
    shares with any neighbour; the rest of its prompt is its own. Equal prompts share all but the last token,
    in whole blocks, because an engine computes at least one token. A prompt that is a prefix of another may
    have no token of its own.

    Invariants, checked by `check_integrity`:
        - `leaf_row` names no row of the requests twice;
        - `parent[0]` is -1 and `parent[i] < i` otherwise; `depth[parent[i]] < depth[i]`; `depth[0]` is 0;
        - depths are whole blocks, and no leaf's prompt is shorter than its node;
        - a node's leaves are `leaf_start[i]:leaf_end[i]`, at least 2 below the root, inside those of its
          parent;
        - what neighbours share is the depth of the lowest node that holds both.

    Attributes:
        block_size: tokens of a KV block.
        seq: `(num_requests,)` int64, of the leaves in order.
        leaf_row: `(num_requests,)` int64, row of each leaf in the requests that the tree was built from.
        num_prompt_tokens: `(num_requests,)` int64, of the leaves in order.
        num_shared_tokens: `(num_requests,)` int64, leading tokens that each leaf shares with the leaf before
            it.
        leaf_parent: `(num_requests,)` int64, node that the leaf hangs on.
        parent: `(num_nodes,)` int64.
        depth: `(num_nodes,)` int64, tokens from the root to the end of the node's segment.
        leaf_start: `(num_nodes,)` int64.
        leaf_end: `(num_nodes,)` int64.
    """

    block_size: int
    seq: npt.NDArray[np.int64]
    leaf_row: npt.NDArray[np.int64]
    num_prompt_tokens: npt.NDArray[np.int64]
    num_shared_tokens: npt.NDArray[np.int64]
    leaf_parent: npt.NDArray[np.int64]
    parent: npt.NDArray[np.int64]
    depth: npt.NDArray[np.int64]
    leaf_start: npt.NDArray[np.int64]
    leaf_end: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.seq)

    @property
    def num_nodes(self) -> int:
        """Inner nodes, the root included."""
        return len(self.parent)

    @property
    def total_shared_tokens(self) -> int:
        """Prompt tokens that an unlimited cache serves in depth-first order."""
        return int(self.num_shared_tokens.sum())

    def check_integrity(self) -> None:
        """Checks the invariants of the class.

        Raises:
            PlanError: the first one that does not hold.
        """
        n, below = len(self), self.parent[1:]
        _require(len(np.unique(self.leaf_row)) == n, "leaf_row names a row twice")
        _require(self.parent[0] == -1 and self.depth[0] == 0, "node 0 is no root")
        _require(
            bool(np.all((below >= 0) & (below < np.arange(1, self.num_nodes)))), "nodes are not in preorder"
        )
        _require(bool(np.all(self.depth[below] < self.depth[1:])), "a node has no segment")
        _require(not np.any(self.depth % self.block_size), "a node is not in whole blocks")
        _require(
            bool(np.all(self.depth[self.leaf_parent] <= self.num_prompt_tokens)),
            "a prompt ends before its node",
        )
        _require(self.leaf_start[0] == 0 and self.leaf_end[0] == n, "the root does not hold every leaf")
        _require(bool(np.all(self.leaf_end[1:] - self.leaf_start[1:] >= 2)), "a node is not shared")
        inside = (self.leaf_start[below] <= self.leaf_start[1:]) & (self.leaf_end[1:] <= self.leaf_end[below])
        _require(bool(np.all(inside)), "a node leaves its parent")
        place = np.arange(n)
        holds = (self.leaf_start[self.leaf_parent] <= place) & (place < self.leaf_end[self.leaf_parent])
        _require(bool(np.all(holds)), "a leaf hangs on a node that does not hold it")
        shared = np.zeros(n, dtype=np.int64)
        for node in range(self.num_nodes):
            # Preorder: deeper nodes overwrite what their ancestors wrote.
            shared[self.leaf_start[node] + 1 : self.leaf_end[node]] = self.depth[node]
        _require(
            bool(np.array_equal(shared, self.num_shared_tokens)), "neighbours do not share their lowest node"
        )


def build_prefix_tree(requests: PromptSet, block_size: int) -> PrefixTree:
    """Builds the tree of all prompts. The order of the requests' rows does not change its leaves or nodes."""
    return _tree_of_order(requests, requests.lexical_order(), block_size)


def without_leaves(tree: PrefixTree, requests: PromptSet, is_left_out: npt.NDArray[np.bool_]) -> PrefixTree:
    """Returns the tree of the other leaves. Does not mutate; `leaf_row` goes on naming rows of `requests`.

    Args:
        tree: the tree.
        requests: what it was built from.
        is_left_out: `(num_requests,)` bool by row.
    """
    # What is left of an order is in order.
    return _tree_of_order(requests, tree.leaf_row[~is_left_out[tree.leaf_row]], tree.block_size)


def _tree_of_order(requests: PromptSet, order: npt.NDArray[np.int64], block_size: int) -> PrefixTree:
    shared = requests.shared_with_previous(order, block_size)
    parent, depth, start, end, leaf_parent = _intervals(shared)
    return PrefixTree(
        block_size=block_size,
        seq=requests.seq[order],
        leaf_row=order,
        num_prompt_tokens=requests.num_prompt_tokens[order],
        num_shared_tokens=shared,
        leaf_parent=leaf_parent,
        parent=parent,
        depth=depth,
        leaf_start=start,
        leaf_end=end,
    )


@numba.njit(cache=True, nogil=True)
def _intervals(
    shared: npt.NDArray[np.int64],
) -> tuple[
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
]:
    """Reads the tree off the lengths that neighbours share, with a stack of the nodes that are still open.

    Returns `parent`, `depth`, `leaf_start`, `leaf_end` of the nodes in preorder and `leaf_parent`.
    """
    n = len(shared)
    # Nodes as they are closed: a node is closed after all below it, so this order is a postorder.
    post_depth = np.empty(max(n, 1), dtype=np.int64)
    post_start = np.empty(max(n, 1), dtype=np.int64)
    post_end = np.empty(max(n, 1), dtype=np.int64)
    num_nodes = 0
    open_depth = np.empty(n + 1, dtype=np.int64)
    open_start = np.empty(n + 1, dtype=np.int64)
    open_depth[0], open_start[0], top = 0, 0, 0
    for place in range(1, n + 1):
        common = shared[place] if place < n else 0
        start = place - 1
        while open_depth[top] > common:
            start = open_start[top]
            post_depth[num_nodes], post_start[num_nodes], post_end[num_nodes] = open_depth[top], start, place
            num_nodes += 1
            top -= 1
        if open_depth[top] < common:
            top += 1
            open_depth[top], open_start[top] = common, start
    post_depth[num_nodes], post_start[num_nodes], post_end[num_nodes] = 0, 0, n
    num_nodes += 1

    # Preorder is by first leaf, wider before narrower: a counting sort over the reversed postorder is stable
    # in both, since of two nodes with one first leaf the wider one closes later.
    first = np.zeros(n + 2, dtype=np.int64)
    for node in range(num_nodes):
        first[post_start[node] + 1] += 1
    for place in range(n + 1):
        first[place + 1] += first[place]
    depth = np.empty(num_nodes, dtype=np.int64)
    leaf_start = np.empty(num_nodes, dtype=np.int64)
    leaf_end = np.empty(num_nodes, dtype=np.int64)
    for node in range(num_nodes - 1, -1, -1):
        to = first[post_start[node]]
        first[post_start[node]] += 1
        depth[to], leaf_start[to], leaf_end[to] = post_depth[node], post_start[node], post_end[node]

    parent = np.full(num_nodes, -1, dtype=np.int64)
    leaf_parent = np.zeros(n, dtype=np.int64)
    current, node = 0, 1
    for place in range(n):
        while current > 0 and leaf_end[current] <= place:
            current = parent[current]
        while node < num_nodes and leaf_start[node] == place:
            parent[node] = current
            current = node
            node += 1
        leaf_parent[place] = current
    return parent, depth, leaf_start, leaf_end, leaf_parent


def _require(holds: bool, fault: str) -> None:
    if not holds:
        raise PlanError(f"The prefix tree is damaged ({fault}); plan the job again.")
