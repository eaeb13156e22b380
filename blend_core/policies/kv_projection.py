"""How much KV the requests in flight will hold in the steps ahead, and whether another one fits beside
them."""

from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from blend_core.length_distribution import LENGTH_GRID, LENGTH_GRID_ENDS

Floats = npt.NDArray[np.float64]

DEVIATIONS: Final = 1.5
"""Standard deviations that are kept free above the expected KV. Running out means a preemption, and it hits
the short requests that were admitted last; a little KV left free costs less."""

_SURE: Final = 1e-3
"""A request that is alive with a smaller probability does not count at that time."""


class KvProjection:
    """Mean and variance of KV tokens on the grid of steps ahead, kept up as requests come and go.

    A request that holds `k` tokens now holds `k + t` in `t` steps if it is still running then. Within a bin
    of the grid it counts with what it holds at the bin's end. Between calls of `replace` the sums are shifted
    along the grid, which blurs them a little.

    Attributes:
        mean: `(num_bins,)` expected tokens.
        variance: `(num_bins,)` of them; 0 where every length is known.
    """

    __slots__ = ("_clock", "_deviations", "mean", "variance")

    def __init__(self, deviations: float = DEVIATIONS) -> None:
        """Begins with nothing in flight; `deviations` are kept free above what is expected."""
        self._deviations = deviations
        self.mean: Floats = np.zeros(len(LENGTH_GRID))
        self.variance: Floats = np.zeros(len(LENGTH_GRID))
        self._clock = 0

    @property
    def peak_tokens(self) -> float:
        """The most that is expected to be held at any time."""
        return float(self.mean.max())

    def replace(self, clock: int, mean: Floats, variance: Floats) -> None:
        """Takes sums that were made anew at `clock`."""
        self.mean, self.variance, self._clock = mean, variance, clock

    def add(self, clock: int, num_tokens: float, alive: Floats) -> None:
        """A request that holds `num_tokens` joins; `alive` is `(num_bins,)`, its survival."""
        self._shift(clock)
        mean, variance = contribution(num_tokens, alive)
        self.mean += mean
        self.variance += variance

    def remove(self, clock: int, num_tokens: float, alive: Floats) -> None:
        """Undoes `add` for a request that has grown since."""
        self._shift(clock)
        mean, variance = contribution(num_tokens, alive)
        self.mean = np.maximum(self.mean - mean, 0.0)
        self.variance = np.maximum(self.variance - variance, 0.0)

    def fits(self, clock: int, num_tokens: float, alive: Floats, limit_tokens: float) -> bool:
        """Whether KV stays under the limit, deviations included, while such a request runs as well."""
        self._shift(clock)
        mean, variance = contribution(num_tokens, alive)
        high = self.mean + mean + self._deviations * np.sqrt(self.variance + variance)
        return bool((high[alive > _SURE] <= limit_tokens).all())

    def longest_fit(self, clock: int, num_tokens: float, limit_tokens: float) -> float:
        """Returns for how many steps a request that holds `num_tokens` now and surely lives fits."""
        self._shift(clock)
        high = self.mean + self._deviations * np.sqrt(self.variance) + num_tokens + LENGTH_GRID_ENDS
        over = np.flatnonzero(high > limit_tokens)
        return float(LENGTH_GRID[over[0]]) if len(over) else inf

    def _shift(self, clock: int) -> None:
        num_steps = clock - self._clock
        if num_steps > 0:
            ahead = LENGTH_GRID + num_steps
            bins = np.searchsorted(LENGTH_GRID, ahead, side="right") - 1
            self.mean = _shifted(self.mean, ahead, bins)
            self.variance = _shifted(self.variance, ahead, bins)
            self._clock = clock


def _shifted(sums: Floats, ahead: Floats, bins: npt.NDArray[np.int64]) -> Floats:
    """Returns the sums at later points. Never below what held in their bins: where many end together in the
    next one, a line to it would free their KV too early."""
    return np.maximum(np.interp(ahead, LENGTH_GRID, sums), sums[bins])


def contribution(num_tokens: float | Floats, alive: Floats) -> tuple[Floats, Floats]:
    """Returns mean and variance of the KV tokens ahead of requests; broadcasts over `alive`'s last axis."""
    held = num_tokens + LENGTH_GRID_ENDS
    mean = alive * held
    return mean, mean * (held - mean)
