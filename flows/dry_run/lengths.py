"""How long the answers of a dry run are taken to be: what the planner is told, and what the simulation finds.

The two differ as in a run: the planner knows what can be known before, the simulation draws each length, or
takes the one that was recorded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from blend_core.length_priors import LengthPriors
from blend_core.output_length import OutputLengths, estimate_output_lengths, preset_lengths
from blend_core.prefix_tree import PrefixTree
from blend_core.request import RequestArrays

Floats = npt.NDArray[np.float64]


class LengthBasis(StrEnum):
    """What the lengths rest on."""

    MAX_TOKENS = "max_tokens"
    EXPECTED = "expected"
    RECORDED = "recorded"
    EARLIER_NIGHTS = "earlier_nights"


@dataclass(frozen=True, slots=True, eq=False)
class AnswerLengths:
    """Lengths of all answers, row by row of the requests.

    Attributes:
        basis: what they rest on.
        estimates: what the planner is told.
        actual: `(num_requests,)` int64, what the simulation finds; the planner never sees it.
        num_preset: requests whose length is fixed before they run.
        num_recorded: requests whose length an earlier run recorded; by earlier nights, those of no fixed
            length whose template tells.
        priors: what earlier nights tell, row by row of the requests; the estimates rest on them.
    """

    basis: LengthBasis
    estimates: OutputLengths
    actual: npt.NDArray[np.int64]
    num_preset: int
    num_recorded: int
    priors: LengthPriors | None = None


def lengths_by_bounds(requests: RequestArrays, tree: PrefixTree, rng: np.random.Generator) -> AnswerLengths:
    """Any length between `min_tokens` and `max_tokens` is as likely as another."""
    upper = requests.max_tokens.astype(np.float64)
    lower = np.clip(requests.min_tokens.astype(np.float64), 1.0, upper)
    estimates = estimate_output_lengths(requests, tree)
    return _answers(LengthBasis.MAX_TOKENS, requests, estimates, _uniform(lower, upper, rng), 0)


def lengths_by_mean(requests: RequestArrays, mean: float, rng: np.random.Generator) -> AnswerLengths:
    """Lengths around a mean, as wide as is possible without passing 1, twice the mean or a request's bounds.

    Where the mean itself is out of a request's bounds, the nearer bound is its length. Preset lengths stay.
    """
    upper = requests.max_tokens.astype(np.float64)
    lower = np.clip(requests.min_tokens.astype(np.float64), 1.0, upper)
    preset = preset_lengths(requests)
    centre = np.where(preset, upper, np.clip(mean, lower, upper))
    reach = np.minimum(centre - lower, upper - centre)
    estimates = OutputLengths(centre, centre * centre + reach * reach / 3.0, preset)
    actual = _uniform(centre - reach, centre + reach, rng)
    return _answers(LengthBasis.EXPECTED, requests, estimates, actual, 0)


def lengths_by_record(
    requests: RequestArrays, tree: PrefixTree, recorded: Mapping[int, int], rng: np.random.Generator
) -> AnswerLengths:
    """Recorded lengths are what the simulation finds; to the planner they are samples of other requests.

    No request is planned with its own record: the records are dealt into two halves along the tree, and each
    half is estimated from the other. Requests without a record are estimated from all of them, and drawn with
    that mean and spread.

    Args:
        requests: the requests.
        tree: their prefix tree.
        recorded: output tokens by `seq` of answered requests.
        rng: draws what was not recorded.
    """
    in_order = [int(seq) for seq in tree.seq if int(seq) in recorded]
    halves = [{seq: recorded[seq] for seq in in_order[start::2]} for start in (0, 1)]
    estimates = estimate_output_lengths(requests, tree, recorded)
    mean, second_moment = estimates.mean.copy(), estimates.second_moment.copy()
    for half, other in (halves, halves[::-1]):
        rows = np.flatnonzero(np.isin(requests.seq, np.array(list(half), dtype=np.int64)))
        from_other = estimate_output_lengths(requests, tree, other)
        mean[rows], second_moment[rows] = from_other.mean[rows], from_other.second_moment[rows]
    told = OutputLengths(mean, np.maximum(second_moment, mean * mean), preset_lengths(requests))
    actual = _drawn(requests, told, rng)
    for row, seq in enumerate(requests.seq.tolist()):
        if seq in recorded:
            actual[row] = min(max(recorded[seq], 1), requests.max_tokens[row])
    return _answers(LengthBasis.RECORDED, requests, told, actual, len(in_order))


def lengths_by_earlier_nights(
    requests: RequestArrays, tree: PrefixTree, priors: LengthPriors, rng: np.random.Generator
) -> AnswerLengths:
    """Lengths with mean and spread of earlier answers to the same prompt template, as a run plans with them.

    Requests that earlier nights tell too little about have any length between their bounds.
    """
    estimates = estimate_output_lengths(requests, tree, priors=priors)
    answers = _answers(
        LengthBasis.EARLIER_NIGHTS,
        requests,
        estimates,
        _drawn(requests, estimates, rng),
        int(((priors.telling() >= 0) & ~estimates.known).sum()),
    )
    return replace(answers, priors=priors)


def _answers(
    basis: LengthBasis,
    requests: RequestArrays,
    estimates: OutputLengths,
    actual: npt.NDArray[np.int64],
    num_recorded: int,
) -> AnswerLengths:
    return AnswerLengths(basis, estimates, actual, int(preset_lengths(requests).sum()), num_recorded)


def _drawn(
    requests: RequestArrays, estimates: OutputLengths, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Returns lengths with the estimates' mean and spread, as far as the bounds allow it."""
    mean = estimates.mean
    upper = requests.max_tokens.astype(np.float64)
    lower = np.clip(requests.min_tokens.astype(np.float64), 1.0, upper)
    reach = np.sqrt(3.0 * np.maximum(estimates.second_moment - mean * mean, 0.0))
    return _uniform(np.maximum(mean - reach, lower), np.minimum(mean + reach, upper), rng)


def _uniform(lower: Floats, upper: Floats, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Returns whole numbers from `lower` to `upper`, both included, at least 1."""
    drawn = np.rint(rng.uniform(lower - 0.5, upper + 0.5))
    return np.asarray(np.maximum(np.clip(drawn, np.rint(lower), np.rint(upper)), 1), dtype=np.int64)
