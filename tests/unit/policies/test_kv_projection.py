"""KV ahead of time, against sums made step by step."""

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blend_core.length_distribution import (
    LENGTH_GRID,
    LENGTH_GRID_ENDS,
    LengthDistribution,
    length_counts,
)
from blend_core.policies.kv_projection import DEVIATIONS, KvProjection

requests = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 900)), max_size=10)
NUM_BINS = int(np.searchsorted(LENGTH_GRID, 1_000))


def surely(num_steps):
    """Survival of a request that runs for exactly so many steps more."""
    return (num_steps > LENGTH_GRID).astype(float)


def held_at(running, step):
    """Tokens held so many steps ahead by requests of (tokens now, steps to go)."""
    return sum(held + step for held, left in running if left > step)


@settings(deadline=None)
@given(requests)
def test_known_lengths_are_bounded_from_above_within_a_bin(running):
    projection = KvProjection()
    for held, left in running:
        projection.add(0, held, surely(left))
    assert not projection.variance.any()
    for place in range(NUM_BINS):
        start, end = LENGTH_GRID[place], LENGTH_GRID_ENDS[place]
        steps = range(int(np.ceil(start)), int(np.ceil(end)))
        assert projection.mean[place] >= max(held_at(running, step) for step in steps)
        # Too high by no more than all of them grow in the bin.
        alive = sum(left > start for _, left in running)
        assert projection.mean[place] <= held_at(running, start) + alive * (end - start) + 1e-6
    assert projection.peak_tokens == projection.mean.max()


def test_hidden_lengths_have_the_mean_and_spread_of_many_draws():
    generator = np.random.default_rng(0)
    drawn = np.round(generator.lognormal(6.0, 0.8, 100_000)).clip(1, 4_096)
    lengths = LengthDistribution(4_096, length_counts(drawn))
    now = np.array([0.0, 0.0, 40.0, 200.0, 700.0])
    held = np.array([30.0, 500.0, 90.0, 260.0, 1_000.0])
    projection = KvProjection()
    for tokens, alive in zip(held, lengths.alive_ahead(now), strict=True):
        projection.add(0, tokens, alive)
    left = np.stack([generator.choice(drawn[drawn > so_far], 20_000) - so_far for so_far in now])
    for place in range(0, int(np.searchsorted(LENGTH_GRID, 1_500)), 4):
        totals = ((left > LENGTH_GRID[place]) * (held[:, None] + LENGTH_GRID_ENDS[place])).sum(axis=0)
        assert projection.mean[place] == pytest.approx(totals.mean(), rel=0.03)
        assert projection.variance[place] == pytest.approx(
            totals.var(), rel=0.1, abs=0.01 * totals.mean() ** 2
        )


@given(requests, requests)
def test_who_leaves_at_once_leaves_nothing(stay, leave):
    projection = KvProjection()
    for held, left in stay:
        projection.add(3, held, surely(left) * 0.75)
    mean, variance = projection.mean.copy(), projection.variance.copy()
    for held, left in leave:
        projection.add(3, held, surely(left) * 0.5)
    for held, left in reversed(leave):
        projection.remove(3, held, surely(left) * 0.5)
    np.testing.assert_allclose(projection.mean, mean, atol=1e-6)
    np.testing.assert_allclose(projection.variance, variance, atol=1e-4)


@given(requests, st.lists(st.integers(1, 60), max_size=8))
def test_time_and_leaving_never_make_it_negative(running, pauses):
    projection = KvProjection()
    for held, left in running:
        projection.add(0, held, surely(left))
    clock = 0
    for (held, left), pause in zip(running, pauses, strict=False):
        clock += pause
        projection.remove(clock, held + clock, surely(max(1, left - clock)))
        assert (projection.mean >= 0).all()
        assert (projection.variance >= 0).all()
    assert projection.peak_tokens <= sum(held + LENGTH_GRID_ENDS[NUM_BINS] for held, _ in running)


def test_what_was_ahead_comes_closer():
    projection = KvProjection()
    projection.replace(10, np.interp(LENGTH_GRID, [0, 4_000], [4_000, 0]), np.full(len(LENGTH_GRID), 5.0))
    projection.add(210, 0.0, np.zeros(len(LENGTH_GRID)))
    near = np.flatnonzero(LENGTH_GRID < 3_000)
    expected = 3_800 - LENGTH_GRID[near]
    assert (projection.mean[near] >= expected - 1e-6).all()
    # No more than before, and where bins are narrow next to nothing more than the line.
    assert (projection.mean[near] <= expected + 200 + 1e-6).all()
    assert projection.variance[near] == pytest.approx(5.0)
    assert projection.peak_tokens == pytest.approx(3_800, rel=0.01)


@settings(deadline=None)
@given(requests, st.integers(1, 400))
def test_as_time_goes_on_nothing_is_counted_as_gone_too_early(running, num_steps):
    projection = KvProjection()
    for held, left in running:
        projection.add(0, held, surely(left))
    projection.add(num_steps, 0, np.zeros(len(LENGTH_GRID)))
    for place in range(NUM_BINS):
        step = int(np.ceil(LENGTH_GRID[place])) + num_steps
        if LENGTH_GRID[place] == step - num_steps:
            assert projection.mean[place] >= held_at(running, step) - 1e-6


def test_asking_changes_nothing():
    projection = KvProjection()
    projection.add(0, 100, surely(500))
    projection.fits(0, 50, surely(100), 1_000)
    projection.longest_fit(0, 50, 1_000)
    assert projection.mean.tolist() == ((100 + LENGTH_GRID_ENDS) * surely(500)).tolist()


def test_a_request_that_ends_before_the_peak_fits_where_a_longer_one_does_not():
    projection = KvProjection()
    for _ in range(10):
        projection.add(0, 100, surely(1_000))
    limit = projection.peak_tokens + 20
    assert not projection.fits(0, 100, surely(1_000), limit)
    assert projection.fits(0, 100, surely(500), limit)
    longest = projection.longest_fit(0, 100, limit)
    assert 500 < longest < 1_000
    assert projection.fits(0, 100, surely(longest), limit)


def test_an_uncertain_request_needs_more_room_than_a_sure_one():
    lengths = LengthDistribution(4_096, length_counts(np.arange(100, 2_000, 10)))
    alive = lengths.alive_ahead(np.zeros(1))[0]
    projection = KvProjection()
    mean = (alive * (100 + LENGTH_GRID_ENDS)).max()
    assert not projection.fits(0, 100, alive, mean)
    spread = np.sqrt(alive * (1 - alive)) * (100 + LENGTH_GRID_ENDS)
    assert projection.fits(
        0, 100, alive, float((alive * (100 + LENGTH_GRID_ENDS) + DEVIATIONS * spread).max())
    )


def test_an_empty_engine_fits_all_that_the_limit_allows():
    projection = KvProjection()
    assert projection.peak_tokens == 0
    assert projection.longest_fit(0, 10, inf) == inf
    assert projection.longest_fit(0, 100, 50) == 0
    assert projection.fits(0, 100, surely(64), 100 + 64)
    assert not projection.fits(0, 101, surely(64), 100 + 64)


@settings(deadline=None)
@given(
    requests,
    st.integers(1, 300),
    st.integers(1, 900),
    st.floats(0, 5_000),
    st.integers(0, 50),
)
def test_more_room_or_a_smaller_request_fits_as_well(running, held, left, limit, clock):
    projection = KvProjection()
    for other in running:
        projection.add(0, other[0], surely(other[1]))
    longest = projection.longest_fit(clock, held, limit)
    assert projection.longest_fit(clock, held, limit + 100) >= longest
    assert projection.longest_fit(clock, held + 10, limit) <= longest
    # The two ways to ask agree.
    assert projection.fits(clock, held, surely(left), limit) == (left <= longest)
    if projection.fits(clock, held, surely(left), limit):
        assert projection.fits(clock, held, surely(left), limit + 1)
        assert projection.fits(clock, held, surely(max(1, left // 2)), limit)
        assert projection.fits(clock, max(1, held - 1), surely(left), limit)
