"""Learned lengths against a plain estimate of Kaplan and Meier, request by request."""

from bisect import bisect_right

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blend_core.length_distribution import (
    FAMILY_WEIGHT,
    LENGTH_GRID,
    VAGUE_WEIGHT,
    LengthDistribution,
    length_counts,
)

EDGES = LENGTH_GRID.tolist()
some_lengths = st.lists(st.integers(0, 600), max_size=12)


def bin_of(length: int) -> int:
    return bisect_right(EDGES, length) - 1


def plain_vague(max_tokens: int) -> list[float]:
    """Mass of a log-uniform length in each bin."""

    def reached(edge: float) -> float:
        if edge > max_tokens:
            return 0.0
        return 1.0 - float(np.log(max(edge, 1.0)) / np.log(max_tokens)) if max_tokens > 1 else 1.0

    return [reached(a) - reached(b) for a, b in zip(EDGES, [*EDGES[1:], 2.0 * EDGES[-1]], strict=True)]


def plain_survival(
    max_tokens: int, ended: list[int], running: list[int], family: list[float] | None = None
) -> list[float]:
    """Product over bins of the share at risk that did not end there."""
    prior = [VAGUE_WEIGHT * mass for mass in plain_vague(max_tokens)]
    if family is not None:
        prior = [
            mass + FAMILY_WEIGHT * (here - after)
            for mass, here, after in zip(prior, family, [*family[1:], 0.0], strict=True)
        ]
    survival, reached = [], 1.0
    for place, edge in enumerate(EDGES):
        survival.append(reached if edge <= max_tokens else 0.0)
        num_ended = sum(bin_of(length) == place for length in ended) + prior[place]
        at_risk = sum(bin_of(length) >= place for length in ended) + sum(prior[place:])
        for length in running:
            if bin_of(length) > place:
                at_risk += 1.0
            elif bin_of(length) == place:
                at_risk += 0.5
        reached *= 1.0 - min(1.0, num_ended / at_risk) if at_risk > 0 else 0.0
    return survival


def distribution(max_tokens: int, ended: list[int]) -> LengthDistribution:
    lengths = LengthDistribution(max_tokens)
    for length in ended:
        lengths.observe(length)
    return lengths


@given(st.integers(1, 800), some_lengths, some_lengths)
def test_survival_equals_its_plain_twin(max_tokens: int, ended: list[int], running: list[int]) -> None:
    ended, running = ([min(length, max_tokens) for length in lengths] for lengths in (ended, running))
    lengths = distribution(max_tokens, ended)
    lengths.learn(length_counts(running))
    np.testing.assert_allclose(lengths.survival, plain_survival(max_tokens, ended, running), atol=1e-9)


@given(st.integers(2, 800), some_lengths, some_lengths, some_lengths)
def test_a_family_counts_as_a_few_more_answers(
    max_tokens: int, of_family: list[int], ended: list[int], running: list[int]
) -> None:
    of_family, ended, running = (
        [min(length, max_tokens) for length in lengths] for lengths in (of_family, ended, running)
    )
    family, lengths = distribution(max_tokens, of_family), distribution(max_tokens, ended)
    family.learn(length_counts([]))
    lengths.learn(length_counts(running), family)
    expected = plain_survival(max_tokens, ended, running, plain_survival(max_tokens, of_family, []))
    np.testing.assert_allclose(lengths.survival, expected, atol=1e-9)


@given(st.integers(1, 2_000), some_lengths, some_lengths)
def test_moments_are_those_of_a_length_within_the_bound(
    max_tokens: int, ended: list[int], running: list[int]
) -> None:
    ended, running = ([min(length, max_tokens) for length in lengths] for lengths in (ended, running))
    lengths = distribution(max_tokens, ended)
    lengths.learn(length_counts(running))
    assert 1 <= lengths.mean <= max_tokens
    assert lengths.mean**2 <= lengths.second_moment <= max_tokens**2 * (1 + 1e-9)
    assert lengths.survival[0] == 1
    assert (np.diff(lengths.survival) <= 1e-12).all()
    so_far = np.arange(0.0, max_tokens + 1)
    mean, second_moment = lengths.remaining(so_far)
    assert (mean >= 1).all()
    assert (mean <= np.maximum(1, max_tokens - so_far)).all()
    assert (second_moment >= mean * mean).all()


@given(st.integers(1, 2_000), st.lists(st.integers(0, 2_000), min_size=1, max_size=20))
def test_one_more_that_still_runs_never_makes_answers_shorter(max_tokens: int, ended: list[int]) -> None:
    ended = [min(length, max_tokens) for length in ended]
    without, beside = distribution(max_tokens, ended), distribution(max_tokens, ended)
    without.learn(length_counts([]))
    beside.learn(length_counts([max(ended)]))
    assert beside.mean >= without.mean - 1e-9
