"""Prompts as KV blocks: which leading blocks of a prompt other prompts have as well."""

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from blend_core.request import RequestArrays
from blend_core.segment_requests import SegmentRequests

Ints = npt.NDArray[np.int64]

Prompts = RequestArrays | SegmentRequests
"""Requests whose prompts can be compared token by token, or segment by segment."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptBlocks:
    """Every prompt by its length and the runs of blocks that it shares.

    Two prompts have the same run exactly where all their tokens up to the end of the run are equal. Only
    whole blocks are in runs, and only those that at least two prompts have; since sharing is of prefixes,
    they are the leading ones. Blocks are in one run where the same prompts have them, so that a path of a few
    runs stands for hundreds of blocks. Where a prompt ends with a shared block, that block is a run of its
    own: the prompt must compute it in any case, since one token of a prompt is always computed. Rows are
    those of the requests.

    Attributes:
        num_prompt_tokens: `(num_requests,)` int64.
        run_blocks: `(num_runs,)` int64, blocks of each run, at least 1.
        paths: distinct paths of runs, first run first; the first one is empty.
        path_of_row: `(num_requests,)` int64, place of each prompt's path in `paths`.
    """

    num_prompt_tokens: Ints
    run_blocks: Ints
    paths: tuple[tuple[int, ...], ...]
    path_of_row: Ints

    @classmethod
    def of(cls, requests: Prompts, block_size: int) -> "PromptBlocks":
        """Finds the shared blocks of all prompts. Deterministic; does not mutate."""
        num_tokens = requests.num_prompt_tokens
        order = requests.lexical_order()
        common = common_blocks(requests, order, block_size)
        whole, rest = np.divmod(num_tokens[order], block_size)
        parent, depth, node_of = _intervals(common)
        # The runs of a node end where the node ends, and before its last block where a prompt ends there.
        ends_here = np.zeros(len(depth), dtype=np.bool_)
        is_exact = (rest == 0) & (whole == depth[node_of])
        ends_here[node_of[is_exact]] = True
        above = depth[parent]
        is_cut = ends_here & (depth - above > 1)
        num_runs = np.where(depth > 0, 1 + is_cut, 0)
        first_run = np.cumsum(num_runs) - num_runs
        run_blocks = np.empty(int(num_runs.sum()), dtype=np.int64)
        has_runs = depth > 0
        run_blocks[first_run[has_runs]] = (depth - above - is_cut)[has_runs]
        run_blocks[first_run[is_cut] + 1] = 1
        path_of_row = np.empty(len(order), dtype=np.int64)
        path_of_row[order] = node_of
        return cls(
            num_prompt_tokens=num_tokens,
            run_blocks=run_blocks,
            paths=_paths(parent.tolist(), first_run.tolist(), num_runs.tolist()),
            path_of_row=path_of_row,
        )

    def path(self, row: int) -> tuple[int, ...]:
        """Runs of one prompt, first run first."""
        return self.paths[self.path_of_row[row]]

    def num_shared_blocks(self) -> Ints:
        """Returns `(num_requests,)` the blocks of each prompt's runs."""
        of_path = [int(self.run_blocks[list(path)].sum()) for path in self.paths]
        return np.array(of_path, dtype=np.int64)[self.path_of_row]


def common_blocks(requests: Prompts, order: Ints, block_size: int) -> Ints:
    """Returns `(len(order),)` leading whole blocks that each row of `order` shares with the one before.

    Other than `shared_with_previous` it counts a prompt's last block, too: another may use it.
    """
    if isinstance(requests, RequestArrays):
        lengths = np.ones(1, dtype=np.int64)
        common = _common_tokens(requests.token_ids, lengths, requests.offsets, order)
    else:
        common = _common_tokens(requests.segment_ids, requests.segment_tokens, requests.offsets, order)
    return np.asarray(common // block_size, dtype=np.int64)


def _paths(parent: list[int], first_run: list[int], num_runs: list[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the runs on the way from the root to each node; the root is its own parent and the first."""
    paths: list[tuple[int, ...] | None] = [None] * len(parent)
    paths[0] = ()
    for node in range(1, len(parent)):
        way = [node]
        while (path := paths[parent[way[-1]]]) is None:
            way.append(parent[way[-1]])
        for below in reversed(way):
            path = (*path, *range(first_run[below], first_run[below] + num_runs[below]))
            paths[below] = path
    return tuple(path for path in paths if path is not None)


@numba.njit(cache=True, nogil=True)
def _common_tokens(ids: npt.NDArray[np.integer[Any]], lengths: Ints, offsets: Ints, order: Ints) -> Ints:
    """Tokens of the leading ids that neighbours have in common; a single length is that of every id."""
    common = np.zeros(len(order), dtype=np.int64)
    for place in range(1, len(order)):
        left, right = offsets[order[place - 1]], offsets[order[place]]
        limit = min(offsets[order[place - 1] + 1] - left, offsets[order[place] + 1] - right)
        num_equal, num_tokens = 0, 0
        while num_equal < limit and ids[left + num_equal] == ids[right + num_equal]:
            num_tokens += lengths[right + num_equal] if len(lengths) > 1 else lengths[0]
            num_equal += 1
        common[place] = num_tokens
    return common


@numba.njit(cache=True, nogil=True)
def _intervals(common: Ints) -> tuple[Ints, Ints, Ints]:
    """Tree of the stretches of neighbours that have leading blocks in common.

    Returns:
        `(num_nodes,)` parent and depth in blocks of each node, node 0 the root; and `(num_places,)` the
        deepest node of each place.
    """
    num_places = len(common)
    # Each place adds one node for what it shares with the next and may divide one.
    parent = np.zeros(2 * num_places + 1, dtype=np.int64)
    depth = np.zeros(2 * num_places + 1, dtype=np.int64)
    node_of = np.zeros(num_places, dtype=np.int64)
    stack = np.zeros(num_places + 2, dtype=np.int64)
    top, num_nodes = 0, 1
    for place in range(num_places):
        below = 0
        while depth[stack[top]] > common[place]:
            below = stack[top]
            top -= 1
        if depth[stack[top]] < common[place]:
            node = num_nodes
            num_nodes += 1
            depth[node], parent[node], parent[below] = common[place], stack[top], node
            top += 1
            stack[top] = node
        following = common[place + 1] if place + 1 < num_places else 0
        if following > depth[stack[top]]:
            node = num_nodes
            num_nodes += 1
            depth[node], parent[node] = following, stack[top]
            top += 1
            stack[top] = node
        node_of[place] = stack[top]
    return parent[:num_nodes], depth[:num_nodes], node_of
