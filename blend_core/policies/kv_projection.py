"""How much KV the requests in flight will hold in the steps ahead, and whether another one fits beside
them."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
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

_LEAST_ALIVE: Final = 1e-3
"""A request that is alive with a smaller probability does not count at that time."""

_ALL_ALIVE: Final[tuple[Floats, ...]] = tuple(np.ones(num_bins) for num_bins in range(len(LENGTH_GRID) + 1))
"""Probabilities of being alive, over so many bins, of a request that surely is."""

_GRID_ENDS: Final[tuple[float, ...]] = tuple(LENGTH_GRID_ENDS.tolist())


@dataclass(slots=True)
class _Joined:
    """Requests that joined within one bin of the grid, all alive alike, and are not in the sums yet.

    What they hold is counted from where the grid begins, so that it may be less than nothing.
    """

    alive: Floats
    first_bin: int
    num_requests: int = 0
    num_tokens: float = 0.0
    num_tokens_sq: float = 0.0


_Looked = tuple[float, Floats, float, bool, tuple[Floats, Floats, Floats] | None]
"""A request that was looked at, and what its joining makes; a plain tuple, for there are many in a step.

What it holds, counted from where the grid begins; `alive` as `KvProjection.alive` gave it; the bound of KV
with it; whether that bound said enough, so that it is put off; else mean, variance and both together where it
is alive, or None where it surely is.
"""


class KvProjection:
    """Mean and variance of KV tokens on a grid of steps, kept up as requests come.

    A request that holds `k` tokens now holds `k + t` in `t` steps if it is still running then. Within a bin
    of the grid it counts with what it holds at the bin's end. The grid begins at the step of the last
    `replace`; requests that join later count from their step on. A request that ends has nothing to be taken
    away: of a known length it counted up to here, and of others so many were expected to have ended.

    While KV is far from its limit, a bound in one number says so, and those that join are put into the sums
    together once somebody asks for them.
    """

    __slots__ = (
        "_ahead",
        "_crest",
        "_deviations",
        "_first_bin",
        "_high",
        "_high_at_most",
        "_is_high_behind",
        "_joined",
        "_looked_at",
        "_mean",
        "_num_steps",
        "_peak_bin",
        "_peak_tokens",
        "_since",
        "_spread",
        "_variance",
    )

    def __init__(self) -> None:
        """Begins with nothing in flight."""
        self._crest: Floats | None = None
        self.replace(0, np.zeros(len(LENGTH_GRID)), np.zeros(len(LENGTH_GRID)), 0.0)

    def replace(self, clock: int, mean: Floats, variance: Floats, deviations: float) -> None:
        """Takes sums that were made anew at `clock`, where the grid begins; both arrays are kept and changed.

        `deviations`, standard ones, are kept free above what is expected; less than 0 takes less than that.
        """
        self._mean, self._variance, self._since, self._deviations = mean, variance, clock, deviations
        self._spread = 1.0 + max(0.0, deviations) / 2.0
        self._num_steps = self._first_bin = 0
        self._peak_bin, self._peak_tokens = -1, 0.0
        self._ahead: dict[int, Floats] = {}
        self._joined: dict[tuple[int, int], _Joined] = {}
        self._looked_at: _Looked | None = None
        self._sum_up()

    def advance(self, clock: int) -> None:
        """Goes on to a step."""
        num_steps = clock - self._since
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            first_bin = bisect_right(GRID_POINTS, num_steps) - 1
            if first_bin != self._first_bin:
                self._first_bin, self._crest = first_bin, None
            self._ahead = {}

    @property
    def mean(self) -> Floats:
        """`(num_bins,)` expected tokens."""
        self._sum_up_joined()
        return self._mean

    @property
    def variance(self) -> Floats:
        """`(num_bins,)` of the tokens; 0 where every length is known."""
        self._sum_up_joined()
        return self._variance

    def peak_up_to(self, enough_tokens: float) -> float:
        """Returns the most that is expected to be held from now on, or `enough_tokens` where it is more."""
        # What was the peak stays one while it is ahead: requests only join.
        if self._peak_bin < self._first_bin or self._peak_tokens < enough_tokens:
            ahead = self.mean[self._first_bin :]
            place = int(ahead.argmax())
            self._peak_bin, self._peak_tokens = self._first_bin + place, float(ahead[place])
        return min(self._peak_tokens, enough_tokens)

    def alive(self, lengths: LengthDistribution | None, num_output_tokens: int, left: float) -> Floats:
        """Returns the probability that a request runs on, bin by bin from now on, as far as it counts.

        Args:
            lengths: of its kind; None where its own is known.
            num_output_tokens: what it has.
            left: tokens still to come, looked at where they are known.
        """
        if lengths is None:
            end = bisect_left(GRID_POINTS, self._num_steps + max(1.0, left))
            return _ALL_ALIVE[end - self._first_bin]
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
        if num_output_tokens > 0:
            alive /= max(alive[0], LEAST_SURVIVAL)
        # However rare its length is, it is there now.
        alive[0] = 1.0
        return alive[: int(np.count_nonzero(alive > _LEAST_ALIVE))]

    def fits(self, num_tokens: float, alive: Floats, limit_tokens: float) -> bool:
        """Whether KV stays under the limit, deviations included, while such a request runs as well.

        `alive` is what `alive` gave. What was found out is kept for `join`.
        """
        held = num_tokens - self._num_steps
        first = self._first_bin
        # At most all that it will ever hold, and its deviation, sqrt(p (1 - p)) of that, at most half of it.
        own = (held + _GRID_ENDS[first + len(alive) - 1]) * self._spread
        if self._high_at_most + own > limit_tokens:
            self._bring_up()
        high_at_most = self._high_at_most + own
        if high_at_most <= limit_tokens:
            self._looked_at = held, alive, high_at_most, True, None
            return True
        sums = None
        if alive is _ALL_ALIVE[len(alive)]:
            # It has no variance, and so adds to the mean what it adds to both.
            high_peak = held + self._crest_ahead().item(len(alive) - 1)
        else:
            now = slice(first, first + len(alive))
            mean, variance = contribution(held, alive, LENGTH_GRID_ENDS[now])
            mean += self._mean[now]
            variance += self._variance[now]
            sums = mean, variance, mean + self._deviations * np.sqrt(variance)
            high_peak = float(sums[2].max())
        high_at_most = max(self._high_at_most, high_peak)
        self._looked_at = held, alive, high_at_most, False, sums
        return high_peak <= limit_tokens

    def add(self, num_tokens: float, alive: Floats) -> None:
        """A request that holds `num_tokens` joins."""
        self.fits(num_tokens, alive, inf)
        self.join()

    def join(self) -> None:
        """The request that `fits` looked at last joins; nothing may have joined or gone on since."""
        assert self._looked_at is not None, "no request was looked at since the last one joined"
        held, alive, self._high_at_most, is_put_off, sums = self._looked_at
        self._looked_at = None
        first = self._first_bin
        if is_put_off:
            # That is the key of nothing else: the array is kept here.
            key = id(alive), first
            joined = self._joined.get(key)
            if joined is None:
                joined = self._joined[key] = _Joined(alive, first)
            joined.num_requests += 1
            joined.num_tokens += held
            joined.num_tokens_sq += held * held
            return
        self._crest = None
        now = slice(first, first + len(alive))
        if sums is not None:
            self._mean[now], self._variance[now], self._high[now] = sums
            return
        grown = held + LENGTH_GRID_ENDS[now]
        self._mean[now] += grown
        self._high[now] += grown

    def longest_fit(self, num_tokens: float, limit_tokens: float) -> float:
        """Returns for how many steps a request that holds `num_tokens` now and surely lives fits."""
        self._bring_up()
        room = limit_tokens - num_tokens + self._num_steps
        place = self._first_bin + int(self._crest_ahead().searchsorted(room, side="right"))
        return max(0.0, GRID_POINTS[place] - self._num_steps) if place < len(GRID_POINTS) else inf

    def _crest_ahead(self) -> Floats:
        """The most, up to the end of each bin from now on, that KV and its growth until then come to."""
        crest = self._crest
        if crest is None:
            first = self._first_bin
            crest = self._crest = np.maximum.accumulate(self._high[first:] + LENGTH_GRID_ENDS[first:])
        return crest

    def _sum_up_joined(self) -> None:
        """Puts those that joined into mean and variance."""
        if not self._joined:
            return
        for joined in self._joined.values():
            alive = joined.alive
            now = slice(joined.first_bin, joined.first_bin + len(alive))
            ends = LENGTH_GRID_ENDS[now]
            grown = joined.num_requests * ends
            if alive is _ALL_ALIVE[len(alive)]:
                self._mean[now] += joined.num_tokens + grown
                continue
            self._mean[now] += alive * (joined.num_tokens + grown)
            # The sum of (held + end)^2 over all of them.
            squares = joined.num_tokens_sq + (2.0 * joined.num_tokens + grown) * ends
            self._variance[now] += alive * (1.0 - alive) * squares
        self._joined = {}
        self._is_high_behind = True

    def _bring_up(self) -> None:
        """Makes what depends on mean and variance anew where they have changed."""
        self._sum_up_joined()
        if self._is_high_behind:
            self._sum_up()

    def _sum_up(self) -> None:
        self._high: Floats = self._mean + self._deviations * np.sqrt(self._variance)
        self._high_at_most = float(self._high[self._first_bin :].max())
        self._crest, self._is_high_behind = None, False


def contribution(
    num_tokens: float | Floats, alive: Floats, ends: Floats = LENGTH_GRID_ENDS
) -> tuple[Floats, Floats]:
    """Returns mean and variance of the KV tokens ahead of requests; broadcasts over `alive`'s last axis."""
    held = num_tokens + ends
    mean = alive * held
    return mean, mean * (held - mean)
