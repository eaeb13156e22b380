"""How many replicas finish by a deadline."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from blend_core.errors import ConfigurationError

MAX_NUM_REPLICAS: Final = 64
MAX_DEADLINE_S: Final = 3_650 * 86_400.0
LEAST_GROWTH: Final = 1.25
"""Factor between two numbers of replicas that are tried, at least: each try is a simulation."""
NUM_BELOW: Final = 3
"""Numbers below the one that was found that are tried at most: few long answers may lie luckily there."""

_SECONDS: Final = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
_DEADLINE: Final = re.compile(r"(?:\d+(?:\.\d+)?[dhms])+\Z")
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)([dhms])")


def seconds_of(text: str) -> float:
    """Reads a stretch of time such as `6h`, `90m`, `1h30m` or `45s`.

    Raises:
        ConfigurationError: it is written in another way, is nothing, or more than ten years.
    """
    seconds = 0.0
    if _DEADLINE.match(text):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
    if not 0 < seconds <= MAX_DEADLINE_S:
        raise ConfigurationError(
            f"{text!r} is no deadline; write it as 6h, 90m, 1h30m or 45s, at most 3650d."
        )
    return seconds


@dataclass(frozen=True, slots=True)
class ReplicaCount:
    """What a search for the number of replicas found.

    Attributes:
        num_replicas: the smallest number that was found to be in time; None where none is.
        durations_s: what the slowest replica takes, by the numbers that were tried.
    """

    num_replicas: int | None
    durations_s: dict[int, float]


def replicas_for(
    deadline_s: float,
    duration_of: Callable[[int], float],
    max_num_replicas: int = MAX_NUM_REPLICAS,
) -> ReplicaCount:
    """Finds a small number of replicas whose slowest one ends by the deadline.

    The number grows by what is missing until it is in time, then the gap to the last one that was late is
    halved. That is the smallest where durations fall with the number. They need not where a few long answers
    decide: so the `NUM_BELOW` untried numbers under it are tried as well, as far as an equal share of what
    one replica takes would be in time. What is found is always in time; a smaller one may be, too.

    Args:
        deadline_s: seconds that the slowest replica may take.
        duration_of: simulates that many replicas; asked once for each number.
        max_num_replicas: the search ends there.
    """
    durations: dict[int, float] = {}
    late, number = 0, 1
    while True:
        durations[number] = duration_of(number)
        if durations[number] <= deadline_s:
            break
        late = number
        if number == max_num_replicas:
            return ReplicaCount(None, durations)
        wanted = max(number * durations[number] / deadline_s, number + 1)
        if number > 1:
            wanted = max(wanted, number * LEAST_GROWTH)
        number = math.ceil(min(wanted, max_num_replicas))
    while number - late > 1:
        middle = (number + late) // 2
        durations[middle] = duration_of(middle)
        if durations[middle] <= deadline_s:
            number = middle
        else:
            late = middle
    below = [untried for untried in range(number - 1, 0, -1) if untried not in durations][:NUM_BELOW]
    for untried in below:
        if durations[1] / untried > deadline_s:
            break
        durations[untried] = duration_of(untried)
        if durations[untried] <= deadline_s:
            number = untried
    return ReplicaCount(number, durations)
