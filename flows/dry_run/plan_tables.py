"""Tables of a forecast for a terminal: what each policy takes, and requests by density as bars."""

import math
from typing import Final

from blend_core.wording import duration_text, seconds_text
from flows.dry_run.forecast import Forecast
from flows.dry_run.histogram import DensityBin
from flows.tables import percent_text, text_table

BAR_WIDTH: Final = 24
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def policy_table(told: Forecast) -> str:
    """What each policy takes."""
    headers = ("policy", "duration", "seconds", "of optimum", "sharing planned", "simulated", "preempted")
    num_requests = told.summary.num_requests
    rows = [
        (
            entry.policy,
            duration_text(entry.estimated_duration_s),
            seconds_text(entry.estimated_duration_s, num_decimals=1),
            percent_text(entry.fraction_of_optimum),
            percent_text(entry.prefix_sharing),
            # Those of a sample are not those of the whole: its stretches share more, or less.
            percent_text(entry.simulated_sharing) if entry.num_simulated == num_requests else None,
            entry.num_preempted if entry.num_simulated == num_requests else None,
        )
        for entry in told.policies
    ]
    return text_table(headers, rows)


def density_chart(bins: tuple[DensityBin, ...]) -> str:
    """Requests by density: their share of the requests and of the work, as bars on one scale."""
    total = sum(entry.num_requests for entry in bins)
    total_s = sum(entry.compute_s + entry.memory_s for entry in bins)
    shares = [(entry.num_requests / total, (entry.compute_s + entry.memory_s) / total_s) for entry in bins]
    largest = max(max(pair) for pair in shares)
    rows = [
        (
            _range_text(entry),
            entry.num_requests,
            percent_text(of_requests),
            _bar(of_requests / largest),
            percent_text(of_work),
            _bar(of_work / largest),
        )
        for entry, (of_requests, of_work) in zip(bins, shares, strict=True)
    ]
    return text_table(("density", "requests", "share", "", "of the work", ""), rows)


def _range_text(entry: DensityBin) -> str:
    if entry.low == 0:
        return "any" if math.isinf(entry.high) else f"under {entry.high:g}"
    if math.isinf(entry.high):
        return f"{entry.low:g} and over"
    return f"{entry.low:g} to {entry.high:g}"


def _bar(share: float) -> str:
    whole, eighths = divmod(round(share * BAR_WIDTH * 8), 8)
    return "█" * whole + (_EIGHTHS[eighths] if eighths else "")
