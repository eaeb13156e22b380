"""The distribution of answer lengths of one kind of request, learned while requests of that kind run.

Requests that finish first are the short ones, so a mean of finished answers is too small. Those still running
are observations too: each says that its length is above what it has now. The estimate is that of Kaplan and
Meier (1958) on a grid of lengths, with the hazard of a vague prior where nothing was seen.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import log
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

FIRST_BIN_TOKENS: Final = 8
"""Width of the first bins of the grid."""

GRID_RATIO: Final = 1.08
"""Ratio of neighbouring grid points where bins are wider than that."""

LONGEST_TOKENS: Final = 1 << 20
"""End of the grid: longer than any answer of a known model."""

FAMILY_WEIGHT: Final = 16.0
"""Observations that the lengths of like kinds count for: what is seen of few is drawn towards what is seen of
all."""

TOLD_ANSWERS: Final = 32.0
"""Earlier answers of its own by which a kind is told: it is not drawn towards like kinds any more."""

VAGUE_WEIGHT: Final = 0.02
"""Observations that the vague prior counts for: it decides where nobody was seen and is lost among a few."""


LEAST_SURVIVAL: Final = 1e-9
"""A probability of being still alive counts as this at least where others are conditional on it."""


def _grid() -> Floats:
    points = [0.0]
    while points[-1] < LONGEST_TOKENS:
        points.append(max(points[-1] + FIRST_BIN_TOKENS, points[-1] * GRID_RATIO))
    return np.array(points)


LENGTH_GRID: Final[Floats] = _grid()
"""Left edges of the bins, `(num_bins,)` tokens; lengths and steps ahead share the grid."""

LENGTH_GRID_ENDS: Final[Floats] = np.append(LENGTH_GRID[1:], LENGTH_GRID[-1] * GRID_RATIO)
"""Right edges of the bins, `(num_bins,)` tokens."""

GRID_POINTS: Final[tuple[float, ...]] = tuple(LENGTH_GRID.tolist())
"""`LENGTH_GRID`, for a search of one length."""


def length_counts(num_output_tokens: npt.ArrayLike) -> Floats:
    """Returns `(num_bins,)` how many of the lengths lie in each bin of `LENGTH_GRID`."""
    lengths = np.asarray(num_output_tokens, dtype=np.float64)
    places = np.searchsorted(LENGTH_GRID, lengths, side="right") - 1
    return np.bincount(places, minlength=len(LENGTH_GRID)).astype(np.float64)


class LengthDistribution:
    """How long answers of one kind are, as far as it is known.

    Without any observation a length is log-uniform between 1 and its bound: every order of magnitude is as
    likely as another, since a bound says little about where below it answers end.

    Attributes:
        max_tokens: bound of the lengths.
        mean: `E[d]`, between 1 and the bound.
        second_moment: `E[d^2]`, between the squared mean and the squared bound.
        is_told: the prior has `TOLD_ANSWERS` or more.
        survival: `(num_bins,)` probability of reaching each point of `LENGTH_GRID`; 0 beyond the bound.
    """

    __slots__ = (
        "_beyond",
        "_beyond_sq",
        "_counts",
        "_middles",
        "_vague",
        "_widths",
        "is_told",
        "max_tokens",
        "mean",
        "second_moment",
        "survival",
    )

    def __init__(self, max_tokens: int, prior_counts: Floats | None = None) -> None:
        """Begins with what is known before the first request runs.

        Args:
            max_tokens: bound of the lengths.
            prior_counts: `(num_bins,)` answers of earlier requests of the kind by bin; may be fractions.
        """
        self.max_tokens = max_tokens
        reached = np.ones(len(LENGTH_GRID))
        if max_tokens > 1:
            reached -= np.log(np.maximum(LENGTH_GRID, 1.0)) / log(max_tokens)
        reached = np.clip(reached, 0.0, 1.0)
        reached[max_tokens < LENGTH_GRID] = 0.0
        ends = np.minimum(LENGTH_GRID_ENDS, max_tokens)
        self._widths: Floats = np.maximum(ends - LENGTH_GRID, 0.0)
        self._middles: Floats = (LENGTH_GRID + ends) / 2.0
        self._vague = VAGUE_WEIGHT * (reached - np.append(reached[1:], 0.0))
        self._counts: list[float] = (
            [0.0] * len(LENGTH_GRID) if prior_counts is None else prior_counts.tolist()
        )
        self.is_told = self.num_seen >= TOLD_ANSWERS
        self.survival: Floats = reached
        self.learn(np.zeros(len(LENGTH_GRID)))

    def observe(self, num_output_tokens: int) -> None:
        """Counts an answer that ended; `learn` makes use of it."""
        self._counts[bisect_right(GRID_POINTS, num_output_tokens) - 1] += 1.0

    @property
    def num_seen(self) -> float:
        """Answers counted so far, those of earlier nights by their weight."""
        return sum(self._counts)

    @property
    def counts(self) -> Floats:
        """`(num_bins,)` answers counted so far by bin."""
        return np.array(self._counts)

    def learn(self, running: Floats, family: "LengthDistribution | None" = None) -> None:
        """Estimates anew from all answers counted, and from those that are still running.

        Args:
            running: `(num_bins,)` requests of the kind in flight by their output tokens so far.
            family: lengths of like kinds, to which the estimate is drawn.
        """
        ended = np.array(self._counts) + self._vague
        if family is not None:
            ended += FAMILY_WEIGHT * (family.survival - np.append(family.survival[1:], 0.0))
        # Who is running somewhere in a bin was at risk in half of it.
        at_risk = np.cumsum((ended + running)[::-1])[::-1] - running / 2.0
        hazard = np.divide(ended, at_risk, out=np.ones(len(ended)), where=at_risk > 0)
        reached = np.concatenate(([1.0], np.cumprod(1.0 - np.minimum(hazard, 1.0))))
        reached[:-1][self.max_tokens < LENGTH_GRID] = 0.0
        self.survival = reached[:-1]
        # Within a bin answers end evenly, but in that of the bound most are those that were cut off there.
        at_end = np.where(self.max_tokens < LENGTH_GRID_ENDS, reached[:-1], reached[1:])
        area = (reached[:-1] + at_end) / 2.0 * self._widths
        self._beyond = np.cumsum(area[::-1])[::-1]
        self._beyond_sq = np.cumsum((2.0 * self._middles * area)[::-1])[::-1]
        self.mean = min(max(1.0, float(self._beyond[0])), float(self.max_tokens))
        self.second_moment = max(float(self._beyond_sq[0]), self.mean * self.mean)

    def survival_at(self, num_output_tokens: Floats) -> Floats:
        """Returns the probability of reaching each length; any shape."""
        return np.interp(num_output_tokens, LENGTH_GRID, self.survival)

    def alive_ahead(self, num_output_tokens: Floats) -> Floats:
        """Returns the probability that each request, so long by now, is still running `LENGTH_GRID` steps
        ahead: `(num_running, n)`, of the first `n` bins, since none runs beyond its bound."""
        now = np.maximum(self.survival_at(num_output_tokens), LEAST_SURVIVAL)
        ahead = LENGTH_GRID[: bisect_right(GRID_POINTS, self.max_tokens)]
        return self.survival_at(num_output_tokens[:, None] + ahead[None, :]) / now[:, None]

    def remaining(self, num_output_tokens: Floats) -> tuple[Floats, Floats]:
        """Returns first and second moment of what requests have still to go, given what they have now.

        `E[d - g | d > g]` and `E[(d - g)^2 | d > g]`, both `(num_running,)`, at least 1 and at most what the
        bound leaves.
        """
        at_most = np.maximum(1.0, self.max_tokens - num_output_tokens)
        now = np.maximum(self.survival_at(num_output_tokens), LEAST_SURVIVAL)
        beyond = np.interp(num_output_tokens, LENGTH_GRID, self._beyond)
        beyond_sq = np.interp(num_output_tokens, LENGTH_GRID, self._beyond_sq)
        mean = np.clip(beyond / now, 1.0, at_most)
        second_moment = (beyond_sq - 2.0 * num_output_tokens * beyond) / now
        return mean, np.clip(second_moment, mean * mean, at_most * at_most)


def learn_lengths(kinds: Sequence[tuple[LengthDistribution, Floats]]) -> None:
    """Lets kinds learn, each drawn towards what all kinds of the same bound show together unless it is told.

    Args:
        kinds: each with its `(num_bins,)` requests in flight, as `LengthDistribution.learn` takes them.
    """
    families: dict[int, list[tuple[LengthDistribution, Floats]]] = {}
    for lengths, running in kinds:
        families.setdefault(lengths.max_tokens, []).append((lengths, running))
    for max_tokens, members in families.items():
        family = None
        if len(members) > 1:
            family = LengthDistribution(
                max_tokens, np.sum([lengths.counts for lengths, _ in members], axis=0)
            )
            family.learn(np.sum([running for _, running in members], axis=0))
        for lengths, running in members:
            lengths.learn(running, None if lengths.is_told else family)
