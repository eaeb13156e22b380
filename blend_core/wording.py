"""Counts and durations as people read them, for messages and reports."""

import math


def count_text(number: int, noun: str) -> str:
    """A count with its noun in the right number: `1 token`, `2,048 tokens`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def seconds_text(seconds: float, num_decimals: int = 0) -> str:
    """Seconds as a plain number for a column: with three digits that tell something.

    Args:
        seconds: the duration.
        num_decimals: digits behind the point at least.
    """
    if seconds <= 0 or not math.isfinite(seconds):
        return f"{seconds:g}"
    return f"{seconds:,.{max(num_decimals, 2 - math.floor(math.log10(seconds)))}f}"


def duration_text(seconds: float) -> str:
    """A duration in its two largest units, a short one in three digits: `2 h 05 min`, `4.2 s`, `1.25 ms`."""
    # The bounds are where a number would be rounded to the next unit.
    if seconds <= 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days:,} d {hours:02} h"
