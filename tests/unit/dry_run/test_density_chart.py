"""Requests by density for a terminal."""

import math

from flows.dry_run.histogram import DensityBin
from flows.dry_run.plan_tables import BAR_WIDTH, density_chart


def test_a_bar_is_as_long_as_the_share_before_it() -> None:
    many = DensityBin(0.0, 8.0, num_requests=75, compute_s=0.5, memory_s=0.5)
    heavy = DensityBin(8.0, math.inf, num_requests=25, compute_s=4.0, memory_s=5.0)
    first, second = density_chart((many, heavy)).splitlines()[2:]
    assert first.split() == ["under", "8", "75", "75.0%", "█" * 20, "10.0%", "██▋"]
    assert second.split() == ["8", "and", "over", "25", "25.0%", "██████▋", "90.0%", "█" * BAR_WIDTH]
