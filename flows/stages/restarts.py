"""How often an engine that dies is started again, and after what pause."""

from dataclasses import dataclass

LONGEST_DELAY_S = 60.0


@dataclass(frozen=True, slots=True)
class RestartRules:
    """When to give an engine up.

    Attributes:
        max_restarts: deaths in a row, without an answer between them, after which it is started again. Two
            requests that kill engines, in flight together, cost at most four before an answer comes.
        first_delay_s: pause before the first restart of a row; every further one doubles it, up to a minute.
    """

    max_restarts: int
    first_delay_s: float


class RestartBudget:
    """Counts deaths without progress: an engine that answers in between may die all night."""

    __slots__ = ("_num_deaths", "_rules")

    def __init__(self, rules: RestartRules) -> None:
        """Starts full."""
        self._rules = rules
        self._num_deaths = 0

    @property
    def num_deaths(self) -> int:
        """Deaths since the last answer."""
        return self._num_deaths

    def answered(self) -> None:
        """A request got its answer."""
        self._num_deaths = 0

    def died(self) -> float | None:
        """Counts a death; returns the pause in seconds before the next start, None for no further one."""
        self._num_deaths += 1
        if self._num_deaths > self._rules.max_restarts:
            return None
        return min(self._rules.first_delay_s * 2.0 ** (self._num_deaths - 1), LONGEST_DELAY_S)
