"""How long answers will be: exact where preset, else from earlier nights, samples or `max_tokens`.

Nothing here sees a length before its request has run. Estimates carry `E[d]` and `E[d^2]`, because `memory_s`
is convex in `d`: the square of a mean understates it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numba
import numpy as np
import numpy.typing as npt

from blend_core.length_priors import LengthPriors
from blend_core.prefix_tree import PrefixTree
from blend_core.prompt_set import PromptSet

MIN_NUM_SAMPLES: Final = 32
"""Samples of a small job: fewer say too little about any length."""

MAX_SAMPLED_SHARE: Final = 0.25
"""Share of the hidden requests that are samples at most: beyond it there would be little left to plan."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputLengths:
    """Estimated answer lengths, in the row order of the requests they were made for.

    Attributes:
        mean: `(num_requests,)` float64, `E[d]`, between `min_tokens` and `max_tokens`, at least 1.
        second_moment: `(num_requests,)` float64, `E[d^2]`, at least the squared mean.
        known: `(num_requests,)` bool, the length is exact: preset, or measured because the request has run.
    """

    mean: npt.NDArray[np.float64]
    second_moment: npt.NDArray[np.float64]
    known: npt.NDArray[np.bool_]

    def without_spread(self) -> "OutputLengths":
        """Returns the lengths as the paper takes them, every answer as long as its mean. Does not mutate."""
        return OutputLengths(self.mean, self.mean * self.mean, self.known)


def preset_lengths(requests: PromptSet) -> npt.NDArray[np.bool_]:
    """Returns `(num_requests,)` bool: the answer's length is fixed before it runs (BlendServe §5.1)."""
    preset = (requests.min_tokens >= requests.max_tokens) | (requests.max_tokens == 1)
    return np.asarray(preset, dtype=np.bool_)


def estimate_output_lengths(
    requests: PromptSet,
    tree: PrefixTree,
    samples: Mapping[int, int] | None = None,
    priors: LengthPriors | None = None,
) -> OutputLengths:
    """Estimates every answer's length.

    Preset lengths are exact, and so are those of requests that `samples` names. Of the others, those whose
    prompt template earlier nights tell enough about (`LengthPriors.telling`) get mean and second moment of
    its answers, samples of the same template counted beside `TemplateLengths.weight` earlier ones.

    The rest get mean and second moment of the samples under the lowest node above them that has any: their
    own subtree, or the siblings nearest to it (BlendServe §5.1). Under the root, where prompts have nothing
    in common, they get those of the samples with the same `max_tokens` if there are any. Without any sample
    a length is taken as uniform between `min_tokens` and `max_tokens`.

    Args:
        requests: the requests that the tree was built from.
        tree: their prefix tree.
        samples: measured output tokens by `seq`. Samples of requests that are not in the tree count at the
            root.
        priors: what earlier nights tell, row by row of the requests.
    """
    upper = requests.max_tokens.astype(np.float64)
    lower = np.clip(requests.min_tokens.astype(np.float64), 1.0, upper)
    preset = preset_lengths(requests)
    measured = _measured(requests.seq, samples or {})
    has_run = ~np.isnan(measured)
    # A preset length says nothing about the lengths that are not.
    telling = np.where(preset, np.nan, measured)
    elsewhere = _of_other_requests(requests.seq, samples or {})
    if len(elsewhere) or not np.isnan(telling).all():
        mean, second_moment = _sampled_moments(requests, tree, telling, elsewhere)
        mean, second_moment = (
            np.clip(mean, lower, upper),
            np.clip(second_moment, lower * lower, upper * upper),
        )
    else:
        mean = (lower + upper) / 2.0
        second_moment = mean * mean + (upper - lower) ** 2 / 12.0
    if priors is not None:
        template = priors.telling()
        rows = np.flatnonzero(template >= 0)
        earlier_mean, earlier_sq = _earlier_moments(priors, template, telling, requests.seq)
        mean[rows] = np.clip(earlier_mean[template[rows]], lower[rows], upper[rows])
        second_moment[rows] = np.clip(earlier_sq[template[rows]], lower[rows] ** 2, upper[rows] ** 2)
    exact = np.where(has_run, measured, upper)
    known = preset | has_run
    mean[known] = exact[known]
    second_moment[known] = exact[known] ** 2
    return OutputLengths(mean, np.maximum(second_moment, mean * mean), known)


def choose_samples(
    tree: PrefixTree, hidden: npt.NDArray[np.bool_], fraction: float, seed: int
) -> npt.NDArray[np.int64]:
    """Chooses requests to run first because their lengths say something about the others (BlendServe §5.1).

    One is drawn from each of equal stretches of the hidden leaves in depth-first order, so every subtree gets
    its share. A small job gets at least `MIN_NUM_SAMPLES`, but no job more than `MAX_SAMPLED_SHARE` of its
    hidden requests.

    Args:
        tree: prefix tree of the job.
        hidden: `(num_requests,)` bool in the order of the tree's leaves: the length is not known.
        fraction: share of the hidden requests to sample; 0 samples none.
        seed: same seed, same choice.

    Returns:
        `(num_samples,)` seqs in depth-first order.
    """
    places = np.flatnonzero(hidden)
    if fraction <= 0 or len(places) == 0:
        return np.empty(0, dtype=np.int64)
    wanted = max(math.ceil(fraction * len(places)), MIN_NUM_SAMPLES)
    num_samples = max(min(wanted, math.ceil(MAX_SAMPLED_SHARE * len(places))), 1)
    edges = np.linspace(0, len(places), num_samples + 1).astype(np.int64)
    chosen = np.random.default_rng(seed).integers(edges[:-1], edges[1:])
    return tree.seq[places[chosen]]


def _measured(seq: npt.NDArray[np.int64], samples: Mapping[int, int]) -> npt.NDArray[np.float64]:
    """Returns `(num_requests,)` output tokens of the requests that have run, NaN for the others."""
    if not samples:
        return np.full(len(seq), np.nan)
    sampled = np.fromiter(samples.keys(), dtype=np.int64, count=len(samples))
    values = np.fromiter(samples.values(), dtype=np.float64, count=len(samples))
    order = np.argsort(sampled)
    sampled, values = sampled[order], np.maximum(values[order], 1.0)
    place = np.minimum(np.searchsorted(sampled, seq), len(sampled) - 1)
    return np.where(sampled[place] == seq, values[place], np.nan)


def _of_other_requests(seq: npt.NDArray[np.int64], samples: Mapping[int, int]) -> npt.NDArray[np.float64]:
    """Returns `(num_samples,)` output tokens of samples that are none of the requests, by `seq`."""
    sampled = np.sort(np.fromiter(samples.keys(), dtype=np.int64, count=len(samples)))
    others = sampled[~np.isin(sampled, seq)].tolist()
    return np.array([max(samples[other], 1) for other in others], dtype=np.float64)


def _sampled_moments(
    requests: PromptSet,
    tree: PrefixTree,
    measured: npt.NDArray[np.float64],
    elsewhere: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns `E[d]` and `E[d^2]` for each row from the samples nearest to it in the tree."""
    by_leaf = measured[tree.leaf_row]
    is_sample = ~np.isnan(by_leaf)
    values = np.where(is_sample, by_leaf, 0.0)
    counts = _prefix_sums(is_sample.astype(np.float64))
    sums, squares = _prefix_sums(values), _prefix_sums(values**2)
    node_count = counts[tree.leaf_end] - counts[tree.leaf_start]
    source = _nearest_with_samples(tree.parent, node_count > 0)[tree.leaf_parent]
    mean, second_moment = np.empty(len(requests)), np.empty(len(requests))
    below_root = source > 0
    rows, nodes = tree.leaf_row[below_root], source[below_root]
    start, end = tree.leaf_start[nodes], tree.leaf_end[nodes]
    mean[rows] = (sums[end] - sums[start]) / node_count[nodes]
    second_moment[rows] = (squares[end] - squares[start]) / node_count[nodes]

    rows = tree.leaf_row[~below_root]
    all_samples = np.concatenate((by_leaf[is_sample], elsewhere))
    mean[rows], second_moment[rows] = all_samples.mean(), (all_samples**2).mean()
    sampled = tree.leaf_row[is_sample]
    bounds, group = np.unique(requests.max_tokens[sampled], return_inverse=True)
    if len(bounds):
        place = np.minimum(np.searchsorted(bounds, requests.max_tokens[rows]), len(bounds) - 1)
        has_like = bounds[place] == requests.max_tokens[rows]
        rows, place = rows[has_like], place[has_like]
        number = np.bincount(group)
        mean[rows] = (np.bincount(group, measured[sampled]) / number)[place]
        second_moment[rows] = (np.bincount(group, measured[sampled] ** 2) / number)[place]
    return mean, second_moment


def _earlier_moments(
    priors: LengthPriors,
    template: npt.NDArray[np.int64],
    measured: npt.NDArray[np.float64],
    seq: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns `E[d]` and `E[d^2]` for each template: its earlier answers, and those measured tonight."""
    weight = np.array([one.weight for one in priors.templates])
    total = np.array([one.weight / one.num_answers * one.sum_tokens for one in priors.templates])
    total_sq = np.array([one.weight / one.num_answers * one.sum_tokens_sq for one in priors.templates])
    rows = np.flatnonzero((template >= 0) & ~np.isnan(measured))
    # Summed in the order of seq, so that the order of the rows changes no last digit.
    rows = rows[np.argsort(seq[rows])]
    np.add.at(weight, template[rows], 1.0)
    np.add.at(total, template[rows], measured[rows])
    np.add.at(total_sq, template[rows], measured[rows] ** 2)
    return total / weight, total_sq / weight


@numba.njit(cache=True, nogil=True)
def _nearest_with_samples(
    parent: npt.NDArray[np.int64], has_samples: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Returns `(num_nodes,)` each node's lowest ancestor or itself that has samples; the root without any."""
    nearest = np.arange(len(parent))
    for node in range(1, len(parent)):
        # Preorder: the parent's answer is there already.
        if not has_samples[node]:
            nearest[node] = nearest[parent[node]]
    return nearest


def _prefix_sums(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.concatenate((np.zeros(1), np.cumsum(values)))
