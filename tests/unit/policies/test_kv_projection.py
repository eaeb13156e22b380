"""KV ahead of time, against sums made step by step."""

from math import inf

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blend_core.length_distribution import (
    LENGTH_GRID,
    LENGTH_GRID_ENDS,
    LengthDistribution,
    length_counts,
)
from blend_core.policies.kv_projection import KvProjection

requests = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 900)), max_size=10)
NOTHING = np.zeros(len(LENGTH_GRID))
NUM_BINS = int(np.searchsorted(LENGTH_GRID, 1_000))


def join(projection, held, left):
    """Lets a request of known length join."""
    projection.add(held, projection.alive(None, 0, left))


def fits(projection, held, left, limit):
    return projection.fits(held, projection.alive(None, 0, left), limit)


def held_at(running, step):
    """Tokens held at a step by requests of (tokens when they joined, steps to go, step of joining)."""
    return sum(held + step - joined for held, left, joined in running if left > step - joined)


@settings(deadline=None)
@given(requests, st.lists(st.integers(0, 90), min_size=10, max_size=10))
def test_known_lengths_are_bounded_from_above_within_a_bin(running, pauses):
    projection, joined, clock = KvProjection(), [], 0
    for (held, left), pause in zip(running, pauses, strict=False):
        clock += pause
        projection.advance(clock)
        join(projection, held, left)
        joined.append((held, left, clock))
    assert not projection.variance.any()
    for place in range(NUM_BINS):
        start, end = LENGTH_GRID[place], LENGTH_GRID_ENDS[place]
        steps = range(max(clock, int(np.ceil(start))), int(np.ceil(end)))
        for step in steps:
            assert projection.mean[place] >= held_at(joined, step) - 1e-6
        if steps:
            # Too high by no more than all of them grow in the bin.
            alive = [other for other in joined if other[1] + other[2] > start]
            growth = len(alive) * (end - start)
            assert projection.mean[place] <= held_at(alive, start) + growth + 1e-6
    now = int(np.searchsorted(LENGTH_GRID, clock, side="right")) - 1
    assert projection.peak_up_to(inf) == projection.mean[now:].max()


@pytest.mark.parametrize("clock", [0, 100])
def test_hidden_lengths_have_the_mean_and_spread_of_many_draws(clock):
    generator = np.random.default_rng(0)
    drawn = np.round(generator.lognormal(6.0, 0.8, 100_000)).clip(1, 4_096)
    lengths = LengthDistribution(4_096, length_counts(drawn))
    now = np.array([0, 0, 40, 200, 700])
    held = np.array([30.0, 500.0, 90.0, 260.0, 1_000.0])
    projection = KvProjection()
    projection.advance(clock)
    for tokens, so_far in zip(held, now, strict=True):
        projection.add(tokens, projection.alive(lengths, int(so_far), 0.0))
    left = np.stack([generator.choice(drawn[drawn > so_far], 20_000) - so_far for so_far in now])
    first = int(np.searchsorted(LENGTH_GRID, clock))
    for place in range(first, int(np.searchsorted(LENGTH_GRID, 1_500)), 4):
        start, end = LENGTH_GRID[place] - clock, LENGTH_GRID_ENDS[place] - clock
        totals = ((left > start) * (held[:, None] + end)).sum(axis=0)
        assert projection.mean[place] == pytest.approx(totals.mean(), rel=0.03)
        assert projection.variance[place] == pytest.approx(
            totals.var(), rel=0.1, abs=0.01 * totals.mean() ** 2
        )


@pytest.mark.parametrize("so_far", [0, 300])
def test_a_request_of_unknown_length_is_alive_as_its_kind_says(so_far):
    lengths = LengthDistribution(4_096, length_counts(np.arange(100, 2_000, 10)))
    projection = KvProjection()
    projection.advance(50)
    alive = projection.alive(lengths, so_far, 0.0)
    assert alive[0] == 1.0
    assert (np.diff(alive) <= 0).all()
    first = int(np.searchsorted(LENGTH_GRID, 50, side="right")) - 1
    for place in range(1, len(alive), 5):
        steps = LENGTH_GRID[first + place] - 50
        expected = lengths.survival_at(np.array([so_far, so_far + steps]))
        assert alive[place] == pytest.approx(expected[1] / expected[0])


def test_a_request_longer_than_any_before_it_is_there_now():
    counts = length_counts(np.full(10, 100)) * 1e12
    projection = KvProjection()
    alive = projection.alive(LengthDistribution(4_096, counts), 2_000, 0.0)
    assert alive[0] == 1.0
    assert projection.fits(2_050, alive, 3_000)


def test_sums_made_anew_begin_where_they_were_made():
    projection = KvProjection()
    projection.advance(70)
    join(projection, 500, 100)
    projection.replace(130, 4_000.0 * (LENGTH_GRID < 100), NOTHING, 0.0)
    assert projection.peak_up_to(inf) == 4_000
    projection.advance(260)
    assert projection.peak_up_to(inf) == 0
    assert projection.longest_fit(10, 9) == 0


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 900), st.integers(0, 90)), max_size=30),
    st.lists(st.integers(0, 3_000), min_size=30, max_size=30),
)
def test_the_peak_is_that_of_all_that_joined_whenever_it_is_asked_for(running, enough):
    projection, clock = KvProjection(), 0
    for (held, left, pause), enough_tokens in zip(running, enough, strict=False):
        clock += pause
        projection.advance(clock)
        before = projection.peak_up_to(enough_tokens)
        join(projection, held, left)
        told = projection.peak_up_to(enough_tokens)
        now = int(np.searchsorted(LENGTH_GRID, clock, side="right")) - 1
        assert before <= told == min(enough_tokens, projection.mean[now:].max())


def test_the_one_looked_at_last_joins_as_if_it_had_been_added():
    lengths = LengthDistribution(4_096, length_counts(np.arange(100, 2_000, 10)))
    one, other = KvProjection(), KvProjection()
    for projection in (one, other):
        projection.advance(20)
        projection.add(70, projection.alive(lengths, 0, 0.0))
    one.fits(50, one.alive(lengths, 40, 0.0), 1e6)
    one.join()
    other.add(50, other.alive(lengths, 40, 0.0))
    assert one.mean.tolist() == other.mean.tolist()
    assert one.variance.tolist() == other.variance.tolist()
    assert one.longest_fit(10, 500) == other.longest_fit(10, 500)


def test_asking_changes_nothing():
    projection = KvProjection()
    join(projection, 100, 500)
    fits(projection, 50, 100, 1_000)
    projection.longest_fit(50, 1_000)
    assert projection.mean.tolist() == ((100 + LENGTH_GRID_ENDS) * (LENGTH_GRID < 500)).tolist()


def test_a_request_that_ends_before_the_peak_fits_where_a_longer_one_does_not():
    projection = KvProjection()
    for _ in range(10):
        join(projection, 100, 1_000)
    limit = projection.peak_up_to(inf) + 20
    assert not fits(projection, 100, 1_000, limit)
    assert fits(projection, 100, 500, limit)
    longest = projection.longest_fit(100, limit)
    assert 500 < longest < 1_000
    assert fits(projection, 100, longest, limit)


@pytest.mark.parametrize("deviations", [-1.0, 0.0, 1.5])
def test_an_uncertain_request_takes_so_many_deviations_more_than_is_expected(deviations):
    lengths = LengthDistribution(4_096, length_counts(np.arange(100, 2_000, 10)))
    projection = KvProjection()
    projection.replace(0, NOTHING.copy(), NOTHING.copy(), deviations)
    alive = projection.alive(lengths, 0, 0.0)
    held = 100 + LENGTH_GRID_ENDS[: len(alive)]
    spread = np.sqrt(alive * (1 - alive)) * held
    needed = float((alive * held + deviations * spread).max())
    assert projection.fits(100, alive, needed + 1e-6)
    assert not projection.fits(100, alive, needed - 1.0)


def test_an_empty_engine_fits_all_that_the_limit_allows():
    projection = KvProjection()
    assert projection.peak_up_to(inf) == 0
    assert projection.longest_fit(10, inf) == inf
    assert projection.longest_fit(100, 50) == 0
    assert fits(projection, 100, 64, 100 + 64)
    assert not fits(projection, 101, 64, 100 + 64)


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
        join(projection, *other)
    projection.advance(clock)
    longest = projection.longest_fit(held, limit)
    assert projection.longest_fit(held, limit + 100) >= longest
    assert projection.longest_fit(held + 10, limit) <= longest
    # The two ways to ask agree.
    assert fits(projection, held, left, limit) == (left <= longest)
    if fits(projection, held, left, limit):
        assert fits(projection, held, left, limit + 1)
        assert fits(projection, held, max(1, left // 2), limit)
        assert fits(projection, max(1, held - 1), left, limit)


class PlainSums:
    """The twin: every request is put into the sums at once, and looked at in them."""

    def __init__(self, deviations):
        self.mean, self.variance, self.deviations = NOTHING.copy(), NOTHING.copy(), deviations

    def with_one(self, held, alive, first):
        mean, variance = self.mean.copy(), self.variance.copy()
        now = slice(first, first + len(alive))
        tokens = held + LENGTH_GRID_ENDS[now]
        mean[now] += alive * tokens
        variance[now] += alive * (1.0 - alive) * tokens**2
        return mean, variance

    def peak_with_one(self, held, alive, first):
        now = slice(first, first + len(alive))
        mean, variance = self.with_one(held, alive, first)
        return float((mean + self.deviations * np.sqrt(variance))[now].max())


asked = st.tuples(
    st.integers(0, 60),
    st.integers(1, 300),
    st.integers(1, 900),
    st.booleans(),
    st.booleans(),
    st.sampled_from([-300.0, -1.0, 1.0, 300.0, 1e6]),
)


LONG_AND_SHORT = [(0, 300, 900, True, True, 1.0), (0, 10, 5, True, True, 1.0), (0, 1, 900, True, False, -1.0)]
"""The peak of one that joined must not hide a higher one before it."""


@settings(deadline=None)
@given(
    st.lists(asked, min_size=1, max_size=25),
    st.sampled_from([-6.0, 0.0, 1.5]),
    st.sampled_from([range(10, 900, 7), range(800, 900)]),
)
@example(LONG_AND_SHORT, 0.0, range(10, 900, 7))
@example([(0, 100, 1, False, False, -1.0)], 1.5, range(800, 900))
def test_bounds_and_sums_put_off_answer_as_plain_sums_do(requests_asked, deviations, answers):
    lengths = LengthDistribution(900, length_counts(np.array(answers)))
    projection, plain, clock = KvProjection(), PlainSums(deviations), 0
    projection.replace(0, NOTHING.copy(), NOTHING.copy(), deviations)
    for pause, held, left, is_known, is_forced, room in requests_asked:
        clock += pause
        projection.advance(clock)
        first = int(np.searchsorted(LENGTH_GRID, clock, side="right")) - 1
        alive = projection.alive(None if is_known else lengths, 0, left)
        peak = plain.peak_with_one(held - clock, alive, first)
        assert projection.fits(held, alive, peak + room) == (room > 0)
        if is_known:
            assert (left <= projection.longest_fit(held, peak + room)) == (room > 0)
        if room > 0:
            projection.join()
        elif is_forced:
            projection.add(held, alive)
        if room > 0 or is_forced:
            plain.mean, plain.variance = plain.with_one(held - clock, alive, first)
    np.testing.assert_allclose(projection.mean, plain.mean, rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(projection.variance, plain.variance, rtol=1e-9, atol=1e-3)
