"""What a dry run takes the lengths of answers to be."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from blend_core.length_priors import LengthPriors, TemplateLengths
from blend_core.prefix_tree import build_prefix_tree
from blend_core.request import RequestArrays
from flows.dry_run.lengths import (
    lengths_by_bounds,
    lengths_by_earlier_nights,
    lengths_by_mean,
    lengths_by_record,
)
from flows.dry_run.plan_sentences import assumption_text
from flows.dry_run.requests import cut_to, rows_within
from flows.dry_run.target import Target

MakeRequests = Callable[..., RequestArrays]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_without_knowledge_any_length_up_to_the_bound_is_as_likely(
    mixed: MakeRequests, a100: Target, rng: np.random.Generator
) -> None:
    requests = mixed(3_000)
    lengths = lengths_by_bounds(requests, build_prefix_tree(requests, a100.limits.block_size), rng)
    long_ones = requests.max_tokens == 600
    assert lengths.actual.min() >= 1
    assert np.all(lengths.actual <= requests.max_tokens)
    assert lengths.actual[long_ones].mean() == pytest.approx(
        lengths.estimates.mean[long_ones].mean(), rel=0.05
    )
    squares = (lengths.actual[long_ones] ** 2).mean()
    assert squares == pytest.approx(lengths.estimates.second_moment[long_ones].mean(), rel=0.05)


def test_a_given_mean_is_met_where_the_bounds_allow_it(mixed: MakeRequests, rng: np.random.Generator) -> None:
    requests = mixed(3_000)
    lengths = lengths_by_mean(requests, 100, rng)
    long_ones = requests.max_tokens == 600
    assert lengths.actual[long_ones].mean() == pytest.approx(100, rel=0.05)
    assert np.all(lengths.estimates.mean[long_ones] == 100)
    assert np.all(lengths.actual[~long_ones] == 4), "a bound under the mean is the length"
    squares = (lengths.actual[long_ones] ** 2).mean()
    assert squares == pytest.approx(lengths.estimates.second_moment[long_ones].mean(), rel=0.05)


def test_a_preset_length_stays_whatever_mean_is_given(mixed: MakeRequests, rng: np.random.Generator) -> None:
    requests = mixed(30)
    requests = replace(requests, min_tokens=requests.max_tokens)
    lengths = lengths_by_mean(requests, 100, rng)
    assert np.array_equal(lengths.actual, requests.max_tokens)
    assert lengths.estimates.known.all()
    assert lengths.num_preset == 30


def test_a_recorded_length_is_found_by_the_simulation_and_hidden_from_the_plan(
    mixed: MakeRequests, a100: Target, rng: np.random.Generator
) -> None:
    requests = mixed(300)
    tree = build_prefix_tree(requests, a100.limits.block_size)
    truth = np.where(requests.max_tokens == 600, rng.integers(100, 200, 300), 2)
    recorded = {int(seq): int(length) for seq, length in zip(requests.seq, truth, strict=True)}
    lengths = lengths_by_record(requests, tree, recorded, rng)
    assert np.array_equal(lengths.actual, truth)
    assert not lengths.estimates.known.any()

    # Changing one record changes what is told of others, never what is told of its own request.
    other = lengths_by_record(requests, tree, recorded | {0: 599}, np.random.default_rng(0))
    assert other.actual[0] == 599
    assert other.estimates.mean[0] == lengths.estimates.mean[0]
    assert not np.array_equal(other.estimates.mean, lengths.estimates.mean)


def test_no_recorded_answer_is_longer_than_another_model_lets_it_be(
    mixed: MakeRequests, a100: Target, rng: np.random.Generator
) -> None:
    requests = mixed(3)
    tree = build_prefix_tree(requests, a100.limits.block_size)
    within = cut_to(requests, 350 + 50)
    lengths = lengths_by_record(within, tree, {0: 600, 1: 4}, rng)
    assert lengths.actual.tolist()[:2] == [350, 4]


def test_a_prompt_that_leaves_no_room_for_its_shortest_answer_is_not_within_a_model(
    mixed: MakeRequests,
) -> None:
    requests = mixed(6)  # prompts of 50 tokens with answers of up to 600, and of 360 with up to 4
    assert rows_within(requests, 361).tolist() == [0, 1, 2, 3, 4, 5]
    assert rows_within(requests, 360).tolist() == [0, 3]
    at_least_four = replace(requests, min_tokens=np.full(6, 4, dtype=np.int32))
    assert rows_within(at_least_four, 363).tolist() == [0, 3]
    assert set(cut_to(requests, 361).max_tokens.tolist()) == {311, 1}


def test_records_tell_about_the_requests_that_have_none(
    mixed: MakeRequests, a100: Target, rng: np.random.Generator
) -> None:
    requests = mixed(300)
    recorded = {seq: 150 if requests.max_tokens[seq] == 600 else 2 for seq in range(200)}
    lengths = lengths_by_record(requests, build_prefix_tree(requests, a100.limits.block_size), recorded, rng)
    rest = slice(200, 300)
    expected = np.where(requests.max_tokens[rest] == 600, 150, 2)
    assert np.array_equal(lengths.actual[rest], expected)
    assert np.allclose(lengths.estimates.mean[rest], expected)
    assert lengths.num_recorded == 200


def test_earlier_nights_give_mean_and_spread_of_their_template(
    mixed: MakeRequests, a100: Target, rng: np.random.Generator
) -> None:
    requests = mixed(3_000)
    is_long = requests.max_tokens == 600
    # Half of the answers 100 tokens, half of them 200.
    earlier = TemplateLengths(80.0, 80 * 150.0, 40 * (100.0**2 + 200.0**2), ((94, 40.0), (197, 40.0)))
    priors = LengthPriors(np.where(is_long, 0, -1), (earlier,))

    lengths = lengths_by_earlier_nights(
        requests, build_prefix_tree(requests, a100.limits.block_size), priors, rng
    )

    assert set(lengths.estimates.mean[is_long]) == {150.0}
    assert lengths.actual[is_long].mean() == pytest.approx(150, rel=0.05)
    assert lengths.actual[is_long].std() == pytest.approx(50, rel=0.05)
    by_bounds = lengths_by_bounds(requests, build_prefix_tree(requests, a100.limits.block_size), rng)
    assert np.array_equal(lengths.estimates.mean[~is_long], by_bounds.estimates.mean[~is_long])
    assert lengths.num_recorded == is_long.sum()


def test_a_fixed_length_is_not_told_by_earlier_nights(
    mixed: MakeRequests, a100: Target, rng: np.random.Generator
) -> None:
    requests = mixed(30)
    is_long = requests.max_tokens == 600
    requests = replace(requests, min_tokens=np.where(is_long, 0, 4).astype(np.int32))
    # The template tells of six fixed lengths, and of all but three of the others.
    template = np.where(is_long, 0, -1)
    template[np.flatnonzero(~is_long)[:6]] = 0
    template[np.flatnonzero(is_long)[:3]] = -1
    earlier = TemplateLengths(80.0, 80 * 150.0, 80 * 150.0**2, ((150, 80.0),))
    tree = build_prefix_tree(requests, a100.limits.block_size)
    lengths = lengths_by_earlier_nights(requests, tree, LengthPriors(template, (earlier,)), rng)
    assert (lengths.num_preset, lengths.num_recorded) == (20, 7)
    assert assumption_text(lengths, None) == (
        "7 answers are as long as those to the same prompt template on earlier nights; the other 3 have any "
        "length up to their max_tokens"
    )
