"""Counts and durations as people read them."""

import pytest

from blend_core.wording import count_text, duration_text, seconds_text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (2048, "2,048 tokens")]
)
def test_a_count_agrees_with_its_noun(number: int, text: str) -> None:
    assert count_text(number, "token") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.25e-6, "1.25 us"),
        (0.0009996, "1 ms"),
        (0.001, "1 ms"),
        (0.0416, "41.6 ms"),
        (0.9996, "1.0 s"),
        (4.2, "4.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (200_000, "2 d 08 h"),
        (float("inf"), "inf s"),
    ],
)
def test_a_duration_of_any_size_has_digits_that_tell_something(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "num_decimals", "text"),
    [
        (0, 0, "0"),
        (0.0123, 0, "0.0123"),
        (5.04, 1, "5.04"),
        (179.34, 1, "179.3"),
        (179.34, 0, "179"),
        (36_000.4, 0, "36,000"),
    ],
)
def test_a_column_of_seconds_keeps_small_ones(seconds: float, num_decimals: int, text: str) -> None:
    assert seconds_text(seconds, num_decimals) == text
