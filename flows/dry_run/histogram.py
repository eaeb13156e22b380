"""The compute density of requests as a histogram over powers of two."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from blend_core.performance import compute_density, memory_s
from blend_core.plan import Plan
from flows.dry_run.target import Target

MAX_NUM_BINS: Final = 16


@dataclass(frozen=True, slots=True)
class DensityBin:
    """Requests of one stretch of density.

    Attributes:
        low: lowest density of the bin; 0 for the first one.
        high: density that is too high for it; infinite for the last one.
        num_requests: requests in it.
        compute_s: seconds of compute of them at peak figures, tokens shared in the plan's order at no cost.
        memory_s: seconds of KV reading of them at peak figures.
    """

    low: float
    high: float
    num_requests: int
    compute_s: float
    memory_s: float


def density_bins(plan: Plan, target: Target) -> tuple[DensityBin, ...]:
    """Returns bins that cover every density and hold every request of the plan.

    Edges are powers of two, as far apart as keeps the bins within `MAX_NUM_BINS`. One of them is 1, where
    compute takes over from memory, if there are requests on both sides of it.
    """
    memory = memory_s(
        target.model,
        target.device,
        plan.num_prompt_tokens,
        plan.estimated_output_tokens,
        plan.estimated_output_tokens_sq,
    )
    density = compute_density(plan.compute_s, memory)
    powers = np.log2(density)
    low = math.floor(powers.min())
    high = max(math.ceil(powers.max()), low + 1)
    width = math.ceil((high - low) / (MAX_NUM_BINS - 1))
    # Multiples of the width have 0 among them, and 2 to the 0 is 1.
    first = (low // width + 1) * width
    inner = 2.0 ** np.arange(first, high + 1, width, dtype=np.float64)
    place = np.searchsorted(inner, density, side="right")
    edges = [0.0, *inner.tolist(), math.inf]
    counts = np.bincount(place, minlength=len(edges) - 1)
    compute = np.bincount(place, plan.compute_s, minlength=len(edges) - 1)
    read = np.bincount(place, memory, minlength=len(edges) - 1)
    bins = [
        DensityBin(edges[at], edges[at + 1], int(counts[at]), float(compute[at]), float(read[at]))
        for at in range(len(edges) - 1)
    ]
    while len(bins) > 1 and bins[-1].num_requests == 0:
        last = bins.pop()
        bins[-1] = DensityBin(
            bins[-1].low, last.high, bins[-1].num_requests, bins[-1].compute_s, bins[-1].memory_s
        )
    return tuple(bins)
