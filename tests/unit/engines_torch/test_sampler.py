import pytest
import torch

from blend_core.engines.torch.sampler import SampledRow, derived_seed, sample
from blend_core.request import SamplingParams

PROBABILITIES = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])


def draw(num_draws: int, **params: object) -> list[float]:
    """Shares of the tokens among many draws from PROBABILITIES."""
    params = {"temperature": 1.0, **params}
    sampling = SamplingParams(max_tokens=1, **params)  # type: ignore[arg-type]  # tests name the fields
    logits = PROBABILITIES.log().repeat(num_draws, 1)
    tokens = sample(logits, [SampledRow(sampling, seed=3, position=index) for index in range(num_draws)])
    return [tokens.count(token) / num_draws for token in range(5)]


def test_draws_follow_the_distribution() -> None:
    assert draw(4000) == pytest.approx(PROBABILITIES.tolist(), abs=0.03)


def test_temperature_sharpens() -> None:
    squared = PROBABILITIES**2
    assert draw(4000, temperature=0.5) == pytest.approx((squared / squared.sum()).tolist(), abs=0.03)


def test_temperature_zero_takes_the_best() -> None:
    assert draw(10, temperature=0.0) == [1, 0, 0, 0, 0]


def test_top_k_keeps_the_best_k() -> None:
    assert draw(4000, top_k=2) == pytest.approx([2 / 3, 1 / 3, 0, 0, 0], abs=0.03)


def test_top_k_of_one_takes_the_first_of_equal_tokens() -> None:
    rows = [SampledRow(SamplingParams(max_tokens=1, temperature=1.0, top_k=1), seed, 0) for seed in range(20)]
    assert sample(torch.tensor([0.0, 2.0, 2.0, 1.0]).repeat(20, 1), rows) == [1] * 20


def test_top_p_keeps_the_smallest_nucleus() -> None:
    assert draw(4000, top_p=0.8) == pytest.approx([0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0, 0], abs=0.03)
    assert draw(100, top_p=0.01) == [1, 0, 0, 0, 0]


def test_top_p_counts_what_top_k_left() -> None:
    assert draw(4000, top_k=2, top_p=0.6) == [1, 0, 0, 0, 0]


def test_a_nucleus_wider_than_the_sorted_candidates_is_exact() -> None:
    """In a flat vocabulary of 4,000 the best half is 2,000 tokens."""
    logits = torch.zeros(1, 4000)
    logits[0, ::2] = 0.01
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.4)
    tokens = {
        sample(logits.clone(), [SampledRow(sampling, seed=0, position=position)])[0]
        for position in range(300)
    }
    assert all(token is not None and token % 2 == 0 for token in tokens)
    assert len(tokens) > 250


def test_a_row_does_not_see_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 300, generator=generator)
    params = [
        SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)
        for temperature, top_k, top_p in [
            (1, 0, 1),
            (0, 0, 1),
            (2, 5, 1),
            (1, 0, 0.5),
            (0.7, 50, 0.9),
            (1, 300, 1),
        ]
    ]
    rows = [SampledRow(one, seed=index, position=4) for index, one in enumerate(params)]

    together = sample(logits.clone(), rows)

    assert together == [sample(logits[index : index + 1].clone(), [row])[0] for index, row in enumerate(rows)]


def test_banned_tokens_never_come() -> None:
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    row = SampledRow(sampling, seed=0, position=0, banned_token_ids=frozenset({0, 1}))
    assert sample(PROBABILITIES.log().unsqueeze(0), [row]) == [2]


def test_a_row_without_numbers_has_no_token_and_spares_the_others() -> None:
    logits = torch.stack([torch.full((5,), float("nan")), PROBABILITIES.log()])
    for temperature in (0.0, 1.0):
        row = SampledRow(SamplingParams(max_tokens=1, temperature=temperature, top_k=1), 0, 0)
        assert sample(logits.clone(), [row, row]) == [None, 0]


def test_any_integer_is_a_seed() -> None:
    sampling = SamplingParams(max_tokens=1, temperature=1.0)
    for seed in (-1, 0, 2**63, 2**200):
        assert sample(PROBABILITIES.log().unsqueeze(0), [SampledRow(sampling, seed, 0)])[0] in range(5)
    assert derived_seed(0, 1) != derived_seed(1, 0)
