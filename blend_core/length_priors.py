"""How long answers of the same prompt template were on earlier nights: a plan that knows needs no samples.

A template's answers are told by their sums and their histogram. Both are of generated tokens: an answer that
its bound cut counts with the bound, which is what it cost, and what it will cost under the same bound.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from blend_core.length_distribution import LENGTH_GRID, TOLD_ANSWERS

Ints = npt.NDArray[np.int64]

MAX_PRIOR_WEIGHT: Final = 64.0
"""Answers that earlier nights count for at most, however many they were: tonight's soon outweigh them."""

MAX_NUM_TEMPLATES: Final = 128
"""Templates whose lengths are told apart at most, those with the most requests: each is a kind at least."""

MAX_REMEMBERED_ANSWERS: Final = 4096.0
"""Answers of earlier nights that are kept when a night's come in."""


@dataclass(frozen=True, slots=True)
class TemplateLengths:
    """Lengths of the answers of one prompt template.

    Attributes:
        num_answers: answers counted, above 0; a fraction where older nights have faded.
        sum_tokens: their output tokens.
        sum_tokens_sq: the squares of their output tokens.
        bins: (output tokens, answers of about that length), lengths rising: the first whole length of each
            bin of `LENGTH_GRID` that has any.
    """

    num_answers: float
    sum_tokens: float
    sum_tokens_sq: float
    bins: tuple[tuple[int, float], ...]

    @property
    def weight(self) -> float:
        """Answers that they count for in a plan."""
        return min(self.num_answers, MAX_PRIOR_WEIGHT)

    def counts(self, max_tokens: int) -> npt.NDArray[np.float64]:
        """Returns `(num_bins,)` answers by bin of `LENGTH_GRID`, `weight` in all. Does not mutate.

        Those longer than `max_tokens` count with it.
        """
        lengths = np.array([min(length, max_tokens) for length, _ in self.bins], dtype=np.float64)
        places = np.searchsorted(LENGTH_GRID, lengths, side="right") - 1
        number = np.array([number for _, number in self.bins])
        counts = np.bincount(places, number * (self.weight / self.num_answers), minlength=len(LENGTH_GRID))
        return np.asarray(counts, dtype=np.float64)

    def after(self, earlier: "TemplateLengths") -> "TemplateLengths":
        """Returns a night's lengths with those of earlier nights, faded. Does not mutate.

        Of earlier answers `MAX_REMEMBERED_ANSWERS` are kept at most, and new ones take the place of as many
        of these, but of no more than half. So a model that answers otherwise is believed after a few nights,
        and a job of a few requests does not wipe out what a large one told.
        """
        remembered = min(earlier.num_answers, MAX_REMEMBERED_ANSWERS)
        share = max(remembered / 2.0, remembered - self.num_answers) / earlier.num_answers
        bins = Counter({length: share * number for length, number in earlier.bins})
        bins.update(dict(self.bins))
        return TemplateLengths(
            num_answers=self.num_answers + share * earlier.num_answers,
            sum_tokens=self.sum_tokens + share * earlier.sum_tokens,
            sum_tokens_sq=self.sum_tokens_sq + share * earlier.sum_tokens_sq,
            bins=tuple(sorted(bins.items())),
        )


def first_length(place: int) -> int:
    """Returns the shortest answer, in whole tokens, that lies in a bin of `LENGTH_GRID`."""
    return int(np.ceil(LENGTH_GRID[place]))


@dataclass(frozen=True, slots=True, eq=False)
class LengthPriors:
    """What earlier nights tell of a job's requests.

    Attributes:
        template: `(num_requests,)` place in `templates`, row by row of the requests; -1 where nothing is
            known.
        templates: lengths of the templates that are known. Their order decides ties in a plan: let it not
            depend on that of the requests.
    """

    template: Ints
    templates: tuple[TemplateLengths, ...]

    def telling(self) -> Ints:
        """Returns `template`, -1 where what is known is too little to plan by. Does not mutate.

        A template tells when it has `TOLD_ANSWERS`, as many as the samples of a small job; of more than
        `MAX_NUM_TEMPLATES` those with the most requests do. What does not tell is sampled.
        """
        tells = np.array([one.num_answers >= TOLD_ANSWERS for one in self.templates] + [False])
        template = np.where(tells[self.template], self.template, -1)
        size = np.bincount(template[template >= 0], minlength=len(self.templates))
        largest = np.argsort(-size, kind="stable")[:MAX_NUM_TEMPLATES]
        return np.where(np.isin(template, largest), template, -1)

    def take(self, rows: Ints) -> "LengthPriors":
        """Returns the priors of the named rows only, in that order. Does not mutate."""
        return LengthPriors(self.template[rows], self.templates)


def no_priors(num_requests: int) -> LengthPriors:
    """Returns the priors of requests that nothing is known of."""
    return LengthPriors(np.full(num_requests, -1, dtype=np.int64), ())
