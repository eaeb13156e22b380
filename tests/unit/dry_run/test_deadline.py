"""How many replicas finish by a deadline."""

import math
from collections.abc import Callable

import pytest

from blend_core.errors import ConfigurationError
from flows.dry_run.deadline import replicas_for, seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"), [("6h", 21_600), ("90m", 5_400), ("1h30m", 5_400), ("45s", 45), ("1.5d", 129_600)]
)
def test_a_deadline_is_read(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "6", "h", "6 h", "-1h", "0m", "1h30", "tomorrow"])
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigurationError, match="6h, 90m"):
        seconds_of(text)


CURVES: dict[str, Callable[[int], float]] = {
    "even": lambda number: 1_000 / number,
    "with a slow end": lambda number: 1_000 / number + 30,
    "shared prefixes lost": lambda number: 1_000 / number * (1 + 0.02 * number),
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("deadline_s", [2_000, 1_000, 999, 340, 101, 64, 51.7])
def test_the_smallest_number_that_is_in_time_is_found(curve: str, deadline_s: float) -> None:
    duration_of = CURVES[curve]
    asked: list[int] = []

    def simulated(number: int) -> float:
        asked.append(number)
        return duration_of(number)

    found = replicas_for(deadline_s, simulated)
    in_time = [number for number in range(1, 65) if duration_of(number) <= deadline_s]
    assert found.num_replicas == min(in_time, default=None)
    assert len(asked) == len(set(asked)), "each number costs a simulation"
    assert found.durations_s == {number: duration_of(number) for number in asked}


def test_a_smaller_number_in_time_is_found_where_durations_do_not_fall_evenly() -> None:
    # What a few long answers make of it: 7 replicas happen to be in time, 8 and 9 are not.
    uneven = {1: 400.0, 2: 220.0, 3: 170.0, 4: 160.0, 5: 150.0, 6: 104.0, 7: 98.0, 8: 105.0, 9: 102.0}
    found = replicas_for(99.0, lambda number: uneven.get(number, 90.0))
    assert found.num_replicas == 7


def test_numbers_that_even_sharing_would_not_bring_in_time_are_not_tried() -> None:
    found = replicas_for(250.0, lambda number: 1_000 / number * (1 + 0.2 * (number == 4)))
    assert found.num_replicas == 5
    assert min(found.durations_s.keys() - {1}) >= 4


def test_a_deadline_that_no_number_meets_ends_the_search_at_the_largest() -> None:
    asked: list[int] = []

    def never(number: int) -> float:
        asked.append(number)
        return 100.0

    found = replicas_for(99.9, never)
    assert found.num_replicas is None
    assert max(asked) == 64
    assert len(asked) <= 2 + math.ceil(math.log(64, 1.25))


def test_no_more_replicas_are_tried_than_allowed() -> None:
    assert replicas_for(1.0, lambda number: 100 / number, max_num_replicas=7).durations_s.keys() <= set(
        range(1, 8)
    )
