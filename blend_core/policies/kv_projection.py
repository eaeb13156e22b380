"""How much KV the requests in flight will hold in the steps ahead, and whether another one fits beside
them."""

from bisect import bisect_left, bisect_right
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from blend_core.length_distribution import (
    GRID_POINTS,
    LEAST_SURVIVAL,
    LENGTH_GRID,
    LENGTH_GRID_ENDS,
    LengthDistribution,
)

Floats = npt.NDArray[np.float64]

_SURE: Final = 1e-3
"""A request that is alive with a smaller probability does not count at that time."""

_ONES: Final[Floats] = np.ones(len(LENGTH_GRID))


class KvProjection:
    """Mean and variance of KV tokens on a grid of steps, kept up as requests come.

    A request that holds `k` tokens now holds `k + t` in `t` steps if it is still running then. Within a bin
    of the grid it counts with what it holds at the bin's end. The grid begins at the step of the last
    `replace`; requests that join later count from their step on. A request that ends has nothing to be taken
    away: of a known length it counted up to here, and of others so many were expected to have ended.

    Attributes:
        mean: `(num_bins,)` expected tokens.
        variance: `(num_bins,)` of them; 0 where every length is known.
    """

    __slots__ = (
        "_ahead",
        "_deviations",
        "_first_bin",
        "_high",
        "_joined",
        "_num_steps",
        "_since",
        "mean",
        "variance",
    )

    def __init__(self) -> None:
        """Begins with nothing in flight."""
        self.replace(0, np.zeros(len(LENGTH_GRID)), np.zeros(len(LENGTH_GRID)), 0.0)

    def replace(self, clock: int, mean: Floats, variance: Floats, deviations: float) -> None:
        """Takes sums that were made anew at `clock`, where the grid begins.

        `deviations`, standard ones, are kept free above what is expected; less than 0 takes less than that.
        """
        self.mean, self.variance, self._since, self._deviations = mean, variance, clock, deviations
        self._high: Floats = mean + deviations * np.sqrt(variance)
        self._num_steps = self._first_bin = 0
        self._ahead: dict[int, Floats] = {}
        self._joined: tuple[Floats, Floats, Floats] = (mean, variance, self._high)

    def advance(self, clock: int) -> None:
        """Goes on to a step."""
        num_steps = clock - self._since
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self._first_bin = bisect_right(GRID_POINTS, num_steps) - 1
            self._ahead = {}

    @property
    def peak_tokens(self) -> float:
        """The most that is expected to be held from now on."""
        return float(self.mean[self._first_bin :].max())

    def alive(self, lengths: LengthDistribution | None, num_output_tokens: int, left: float) -> Floats:
        """Returns the probability that a request runs on, bin by bin from now on, as far as it counts.

        Args:
            lengths: of its kind; None where its own is known.
            num_output_tokens: what it has.
            left: tokens still to come, looked at where they are known.
        """
        if lengths is None:
            end = bisect_left(GRID_POINTS, self._num_steps + max(1.0, left))
            return _ONES[: end - self._first_bin]
        if num_output_tokens > 0:
            return self._alive(lengths, num_output_tokens)
        # All that start in one step are asked for alike.
        alive = self._ahead.get(id(lengths))
        if alive is None:
            alive = self._ahead[id(lengths)] = self._alive(lengths, 0)
        return alive

    def _alive(self, lengths: LengthDistribution, num_output_tokens: int) -> Floats:
        reached = LENGTH_GRID[self._first_bin :] + (num_output_tokens - self._num_steps)
        alive = lengths.survival_at(np.maximum(reached, num_output_tokens))
        alive /= max(alive[0], LEAST_SURVIVAL)
        # However rare its length is, it is there now.
        alive[0] = 1.0
        return alive[: int(np.count_nonzero(alive > _SURE))]

    def fits(self, num_tokens: float, alive: Floats, limit_tokens: float) -> bool:
        """Whether KV stays under the limit, deviations included, while such a request runs as well.

        `alive` is what `alive` gave. What was found out is kept for `join`.
        """
        first = self._first_bin
        now = slice(first, first + len(alive))
        mean, variance = contribution(num_tokens - self._num_steps, alive, LENGTH_GRID_ENDS[now])
        mean += self.mean[now]
        variance += self.variance[now]
        high = mean + self._deviations * np.sqrt(variance)
        self._joined = mean, variance, high
        return bool(high.max() <= limit_tokens)

    def add(self, num_tokens: float, alive: Floats) -> None:
        """A request that holds `num_tokens` joins."""
        self.fits(num_tokens, alive, inf)
        self.join()

    def join(self) -> None:
        """The request that `fits` looked at last joins; nothing may have joined or gone on since."""
        mean, variance, high = self._joined
        now = slice(self._first_bin, self._first_bin + len(mean))
        self.mean[now], self.variance[now], self._high[now] = mean, variance, high

    def longest_fit(self, num_tokens: float, limit_tokens: float) -> float:
        """Returns for how many steps a request that holds `num_tokens` now and surely lives fits."""
        first = self._first_bin
        high = self._high[first:] + LENGTH_GRID_ENDS[first:]
        over = np.flatnonzero(high > limit_tokens - num_tokens + self._num_steps)
        return max(0.0, GRID_POINTS[first + int(over[0])] - self._num_steps) if len(over) else inf


def contribution(
    num_tokens: float | Floats, alive: Floats, ends: Floats = LENGTH_GRID_ENDS
) -> tuple[Floats, Floats]:
    """Returns mean and variance of the KV tokens ahead of requests; broadcasts over `alive`'s last axis."""
    held = num_tokens + ends
    mean = alive * held
    return mean, mean * (held - mean)
