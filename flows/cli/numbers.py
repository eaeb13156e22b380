"""Numbers that options take: what a range of the command line's parser does not say."""

import math

import typer

MAX_SEED = (1 << 32) - 1
"""Largest seed of a random generator."""

MAX_TOKENS = (1 << 31) - 1
"""Largest `max_tokens` that a request may state, too."""


def not_nan(value: float | None) -> float | None:
    """Refuses what is not a number: it is neither below nor above the bounds of an option.

    Raises:
        typer.BadParameter: the value is NaN.
    """
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number.")
    return value
