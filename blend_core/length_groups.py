"""Which requests are of one kind, so that what the answers of some tell holds for the others."""

import math
from itertools import pairwise
from typing import Final

import numba
import numpy as np
import numpy.typing as npt

from blend_core.output_length import MAX_SAMPLED_SHARE, MIN_NUM_SAMPLES
from blend_core.prefix_tree import PrefixTree
from blend_core.prompt_set import PromptSet

Ints = npt.NDArray[np.int64]

MIN_GROUP_SIZE: Final = 64
"""Requests of a kind of their own at least: twice the samples that a kind is told by."""

MIN_SUBTREE_SIZE: Final = 256
"""Requests behind one prefix that are a kind of their own at least; a prefix is a prompt template."""

MAX_NUM_GROUPS: Final = 256
"""Kinds at most, so that what is kept of them stays small."""

_OCTAVES: Final = 2
"""Prompts of one kind differ in length by less than this many powers of two."""


def group_requests(
    requests: PromptSet, tree: PrefixTree, is_hidden: npt.NDArray[np.bool_], template: Ints
) -> Ints:
    """Groups requests whose answers' lengths are likely to be alike.

    Those behind a common prefix that many share are one kind: it is their template. The others are alike
    where bound and order of magnitude of the prompt are. Small kinds join those with the same bound. Where
    there are more bounds than `MAX_NUM_GROUPS`, as where each prompt is given what the context leaves, bounds
    count as the same up to a factor of two. No kind has requests of two templates that earlier nights tell
    something about.

    Args:
        requests: the requests that the tree was built from.
        tree: their prefix tree.
        is_hidden: `(num_requests,)` which lengths are not known, row by row of the requests.
        template: `(num_requests,)` prompt templates to tell apart, `MAX_NUM_GROUPS / 2` at most; -1 for the
            others.

    Returns:
        `(num_requests,)` number of the kind, from 0; -1 where the length is known.
    """
    rows = tree.leaf_row[is_hidden[tree.leaf_row]]
    group = np.full(len(requests), -1, dtype=np.int64)
    if len(rows) == 0:
        return group
    bound, told = requests.max_tokens[rows].astype(np.int64), template[rows]
    if _num_pairs(bound, told) > MAX_NUM_GROUPS:
        bound = np.ceil(np.log2(bound)).astype(np.int64)
    if _num_pairs(bound, told) > MAX_NUM_GROUPS:
        # What is told of a template holds for every bound.
        bound = np.where(told >= 0, -1, bound)
    octave = np.log2(np.maximum(requests.num_prompt_tokens[rows], 1)).astype(np.int64) // _OCTAVES
    top = _top_nodes(tree.parent)[tree.leaf_parent][is_hidden[tree.leaf_row]]
    size = MIN_GROUP_SIZE
    number = _numbered(bound, told, octave, top, size)
    while number.max() >= MAX_NUM_GROUPS:
        size *= 2
        number = _numbered(bound, told, octave, top, size)
    group[rows] = number
    return group


def choose_group_samples(
    tree: PrefixTree, group: Ints, fraction: float, seed: int, dear_prefix_tokens: int
) -> Ints:
    """Chooses requests to run first because their lengths tell those of their kind.

    Like `choose_samples`, but of every kind: a kind that is a small part of the requests may be most of the
    work. Each gives its share, and `MIN_NUM_SAMPLES` at least, but never more than `MAX_SAMPLED_SHARE` of it.
    In a small job the least is less: all kinds together give at most as much beyond their shares as these
    come to. A sample runs apart from the requests that share its prefix, which is then computed twice: one
    that shares a prefix of `dear_prefix_tokens` or more gives way to a neighbour that shares less.

    Args:
        tree: prefix tree of the job.
        group: `(num_requests,)` kinds in the order of the tree's leaves; below 0 for none to sample.
        fraction: share of each kind; 0 samples none.
        seed: same seed, same choice.
        dear_prefix_tokens: prompt tokens that are dear to compute again.

    Returns:
        `(num_samples,)` seqs.
    """
    if fraction <= 0:
        return np.empty(0, dtype=np.int64)
    generator = np.random.default_rng(seed)
    chosen: list[int] = []
    shared = tree.depth[tree.leaf_parent]
    dear = np.where(shared < dear_prefix_tokens, 0, shared)
    order = np.argsort(group, kind="stable")
    order = order[group[order] >= 0]
    kinds = np.split(order, np.flatnonzero(np.diff(group[order])) + 1)
    least = min(MIN_NUM_SAMPLES, max(1, int(fraction * len(order) / len(kinds))))
    for places in kinds:
        wanted = max(math.ceil(fraction * len(places)), least)
        num_samples = min(wanted, math.ceil(MAX_SAMPLED_SHARE * len(places)))
        edges = np.linspace(0, len(places), num_samples + 1).astype(np.int64)
        for low, high in pairwise(edges.tolist()):
            drawn = int(generator.integers(low, high))
            # Neighbours from the one drawn on, round the end of their stretch.
            behind = np.roll(places[low:high], low - drawn)
            chosen.append(int(behind[np.argmin(dear[behind])]))
    return tree.seq[np.array(chosen, dtype=np.int64)]


def mix_alike(order: Ints, kind: Ints, is_alone: npt.NDArray[np.bool_], seed: int) -> Ints:
    """Returns the order with like requests that share no prefix at each other's places, at random.

    Little is known of their answers, so no order among them is better; and an order by prompt length would
    show answers of one sort first and mislead whoever learns from them.

    Args:
        order: `(num_requests,)` rows.
        kind: which requests are alike, row by row; below 0 for those to leave in place.
        is_alone: which share no prefix with any other, row by row.
        seed: same seed, same order.
    """
    mixed = order.copy()
    places = np.flatnonzero(is_alone[order] & (kind[order] >= 0))
    if len(places) == 0:
        return mixed
    generator = np.random.default_rng(seed)
    # By kind, and within a kind first in order and then at random.
    kinds = kind[order[places]]
    in_order = places[np.argsort(kinds, kind="stable")]
    at_random = places[np.lexsort((generator.random(len(places)), kinds))]
    mixed[in_order] = order[at_random]
    return mixed


def _num_pairs(bound: Ints, template: Ints) -> int:
    return len(np.unique(np.stack((bound, template), axis=1), axis=0))


def _numbered(bound: Ints, template: Ints, octave: Ints, top: Ints, min_size: int) -> Ints:
    """Numbers kinds, small ones joined to others of their bound and template."""
    _, place, size = np.unique(top, return_inverse=True, return_counts=True)
    min_subtree_size = MIN_SUBTREE_SIZE * min_size // MIN_GROUP_SIZE
    prefix = np.where((top > 0) & (size[place] >= min_subtree_size), top, 0)
    octave = np.where(prefix > 0, -1, octave)
    keys = np.stack((bound, template, prefix, octave), axis=1)
    _, number, size = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    number = number.ravel()
    is_small = size[number] < min_size
    keys[is_small, 2:] = -2
    _, number = np.unique(keys, axis=0, return_inverse=True)
    return np.asarray(number.ravel(), dtype=np.int64)


@numba.njit(cache=True, nogil=True)
def _top_nodes(parent: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns `(num_nodes,)` each node's ancestor right below the root, or itself; 0 for the root."""
    top = np.zeros(len(parent), dtype=np.int64)
    for node in range(1, len(parent)):
        # Preorder: the parent's answer is there already.
        top[node] = node if parent[node] == 0 else top[parent[node]]
    return top
