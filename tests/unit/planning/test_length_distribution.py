"""What is learned of answer lengths: without bias by those that end first, and never beyond the bound."""

import heapq

import numpy as np
import pytest

from blend_core.length_distribution import (
    FAMILY_WEIGHT,
    LENGTH_GRID,
    LENGTH_GRID_ENDS,
    LengthDistribution,
    learn_lengths,
    length_counts,
)

NOBODY = np.zeros(len(LENGTH_GRID))
BOUNDS = [1, 2, 3, 7, 8, 9, 15, 16, 64, 100, 512, 4_096, 65_536, 1 << 20, 3 << 20]


def learned(max_tokens: int, ended: np.ndarray, running: np.ndarray | None = None) -> LengthDistribution:
    lengths = LengthDistribution(max_tokens)
    for length in ended.tolist():
        lengths.observe(length)
    lengths.learn(NOBODY if running is None else length_counts(running))
    return lengths


def lognormal(mean: float, variation: float, num: int, seed: int = 0) -> np.ndarray:
    sigma = np.sqrt(np.log(1 + variation**2))
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, num)
    return np.maximum(1, np.round(drawn)).astype(np.int64)


def queue_until(lengths: np.ndarray, num_in_flight: int, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of those that ended and output so far of those that run, where each end starts the next."""
    ends = [(int(length), 0, int(length)) for length in lengths[:num_in_flight]]
    heapq.heapify(ends)
    following = iter(lengths[num_in_flight:].tolist())
    ended: list[int] = []
    while ends[0][0] <= num_steps:
        now, _, length = heapq.heappop(ends)
        ended.append(length)
        after = next(following)
        heapq.heappush(ends, (now + after, now, after))
    return np.array(ended), np.array([num_steps - started for _, started, _ in ends])


@pytest.mark.parametrize(("num_steps", "error", "error_sq"), [(2_000, 0.06, 0.2), (4_500, 0.02, 0.05)])
@pytest.mark.parametrize("variation", [0.5, 1.0, 2.0])
def test_those_still_running_undo_the_bias_of_those_that_ended(
    variation: float, num_steps: int, error: float, error_sq: float
) -> None:
    lengths = np.minimum(lognormal(1_000, variation, 20_000), 4_096)
    ended, running = queue_until(lengths, num_in_flight=1_500, num_steps=num_steps)
    estimate = learned(4_096, ended, running)
    assert ended.mean() < 0.95 * lengths.mean()
    assert estimate.mean == pytest.approx(lengths.mean(), rel=error)
    assert estimate.second_moment == pytest.approx((lengths.astype(float) ** 2).mean(), rel=error_sq)


@pytest.mark.parametrize("max_tokens", BOUNDS)
@pytest.mark.parametrize("share_at_bound", [None, 0.0, 0.5, 1.0])
def test_moments_and_survival_stay_within_the_bound(max_tokens: int, share_at_bound: float | None) -> None:
    lengths = LengthDistribution(max_tokens)
    if share_at_bound is not None:
        num = int(40 * share_at_bound)
        lengths = learned(max_tokens, np.array([max_tokens] * num + [1] * (40 - num)))
    assert 1 <= lengths.mean <= max_tokens
    assert lengths.mean**2 <= lengths.second_moment <= max_tokens**2 * (1 + 1e-12)
    assert lengths.survival[0] == 1
    assert (np.diff(lengths.survival) <= 0).all()
    assert (lengths.survival[max_tokens < LENGTH_GRID] == 0).all()
    so_far = np.array([0.0, max_tokens / 2, max_tokens - 1.0, float(max_tokens)])
    mean, second_moment = lengths.remaining(so_far)
    assert (mean >= 1).all()
    assert (mean <= np.maximum(1, max_tokens - so_far)).all()
    assert (second_moment >= mean**2).all()
    assert (second_moment <= np.maximum(1, max_tokens - so_far) ** 2).all()


@pytest.mark.parametrize("max_tokens", [8, 15, 16, 64, 512, 4_096])
def test_answers_that_are_all_cut_off_are_as_long_as_the_bound(max_tokens: int) -> None:
    lengths = learned(max_tokens, np.full(400, max_tokens))
    assert lengths.mean == pytest.approx(max_tokens, rel=0.001)
    assert lengths.second_moment == pytest.approx(max_tokens**2, rel=0.001)


def test_a_length_of_which_nothing_is_known_is_log_uniform() -> None:
    lengths = LengthDistribution(4_096)
    assert not lengths.counts.any()
    assert lengths.mean == pytest.approx(4_095 / np.log(4_096), rel=0.01)
    assert lengths.survival_at(np.array([64.0])) == pytest.approx(0.5, abs=0.01)


def test_many_answers_leave_nothing_of_the_vague_prior() -> None:
    ended = lognormal(800, 0.7, 5_000, seed=3)
    estimate = learned(32_768, ended)
    assert estimate.mean == pytest.approx(ended.mean(), rel=0.01)
    assert estimate.second_moment == pytest.approx((ended.astype(float) ** 2).mean(), rel=0.02)


def test_counts_of_earlier_answers_are_as_good_as_answers() -> None:
    ended = lognormal(300, 1.0, 200)
    prior = LengthDistribution(4_096, length_counts(ended))
    seen = learned(4_096, ended)
    assert prior.counts.sum() == seen.counts.sum() == 200
    assert prior.counts.tolist() == seen.counts.tolist()
    assert (prior.mean, prior.second_moment) == (seen.mean, seen.second_moment)


def test_observing_waits_for_learning() -> None:
    lengths = LengthDistribution(4_096)
    before = lengths.mean
    for _ in range(50):
        lengths.observe(4_000)
    assert lengths.mean == before
    lengths.learn(NOBODY)
    assert lengths.mean > 3_000


@pytest.mark.parametrize("place", [0, 1, 2, 30, len(LENGTH_GRID) - 1])
def test_a_length_at_an_edge_counts_in_the_bin_that_begins_there(place: int) -> None:
    lengths = LengthDistribution(1 << 20)
    edge = int(np.ceil(LENGTH_GRID[place]))
    lengths.observe(edge)
    assert np.flatnonzero(lengths.counts).tolist() == [place]
    assert np.flatnonzero(length_counts([edge])).tolist() == [place]


@pytest.mark.parametrize("length", [0, 10_000_000])
def test_lengths_outside_the_grid_count_in_its_first_and_last_bin(length: int) -> None:
    lengths = LengthDistribution(1 << 20)
    lengths.observe(length)
    lengths.learn(length_counts([length]))
    place = 0 if length == 0 else len(LENGTH_GRID) - 1
    assert lengths.counts[place] == 1
    assert length_counts([length])[place] == 1
    assert 1 <= lengths.mean <= 1 << 20


def test_the_grid_covers_every_length_once() -> None:
    assert LENGTH_GRID[0] == 0
    assert (LENGTH_GRID[1:] == LENGTH_GRID_ENDS[:-1]).all()
    assert (LENGTH_GRID_ENDS > LENGTH_GRID).all()


@pytest.mark.parametrize("variation", [0.3, 1.0, 2.0])
def test_remaining_equals_moments_of_those_that_got_so_far(variation: float) -> None:
    drawn = np.minimum(lognormal(1_000, variation, 200_000), 16_384).astype(float)
    estimate = LengthDistribution(16_384, length_counts(drawn))
    so_far = np.array([0.0, 100.0, 555.0, 1_000.0, 2_000.0])
    mean, second_moment = estimate.remaining(so_far)
    for place, num_tokens in enumerate(so_far):
        left = drawn[drawn > num_tokens] - num_tokens
        if len(left) > 1_000:
            assert mean[place] == pytest.approx(left.mean(), rel=0.07)
            assert second_moment[place] == pytest.approx((left**2).mean(), rel=0.1)


def test_nothing_written_yet_leaves_all_of_it() -> None:
    estimate = learned(4_096, lognormal(500, 1.0, 300))
    mean, second_moment = estimate.remaining(np.zeros(1))
    assert (mean[0], second_moment[0]) == (estimate.mean, estimate.second_moment)


def test_alive_ahead_is_the_share_that_runs_on() -> None:
    drawn = lognormal(1_000, 1.0, 100_000).astype(float)
    estimate = LengthDistribution(65_536, length_counts(drawn))
    alive = estimate.alive_ahead(np.array([0.0, 700.0]))
    assert alive.shape == (2, np.searchsorted(LENGTH_GRID, 65_536, side="right"))
    assert (alive[:, 0] == 1).all()
    assert (np.diff(alive, axis=1) <= 0).all()
    for row, num_tokens in enumerate((0, 700)):
        reached = drawn[drawn >= num_tokens]
        for place in np.flatnonzero(LENGTH_GRID < 6_000)[::6]:
            assert alive[row, place] == pytest.approx(
                (reached >= num_tokens + LENGTH_GRID[place]).mean(), abs=0.02
            )


def test_a_kind_of_which_little_is_seen_is_drawn_towards_its_family() -> None:
    many, few, none = (LengthDistribution(4_096) for _ in range(3))
    for _ in range(500):
        many.observe(1_000)
    for _ in range(int(FAMILY_WEIGHT)):
        few.observe(100)
    learn_lengths([(many, NOBODY), (few, NOBODY), (none, NOBODY)])
    assert many.mean == pytest.approx(1_000, rel=0.06)
    assert none.mean == pytest.approx(1_000, rel=0.06)
    # As many answers of its own as the family counts for: half way between.
    assert few.mean == pytest.approx(550, rel=0.06)


def test_another_bound_is_another_family() -> None:
    told, untold, other = LengthDistribution(4_096), LengthDistribution(4_096), LengthDistribution(8_192)
    before = other.mean
    for _ in range(100):
        told.observe(50)
    learn_lengths([(told, NOBODY), (untold, NOBODY), (other, NOBODY)])
    assert untold.mean < 80
    assert other.mean == before
