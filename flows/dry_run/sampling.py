"""The part of a large plan that stands for all of it in a simulation."""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from blend_core.partition import partition, rank_positions
from blend_core.plan import Plan
from blend_core.planner import LENGTH_AWARE_POLICIES

NUM_STRETCHES: Final = 8
"""Pieces of the plan that a sample is made of: few, so that most of it runs among its own neighbours."""


def sample_positions(plan: Plan, num_requests: int) -> npt.NDArray[np.int64]:
    """Returns about `num_requests` places of the plan, rising, in stretches as long as may be.

    What a stretch shares and holds is what the whole shares and holds at that place. A plan from both ends is
    cut as for ranks, so that a sample has the density of the whole; one that is run in order is cut into
    stretches at equal distances. Deterministic.
    """
    n = len(plan)
    num_parts = math.ceil(n / num_requests)
    if num_parts <= 1:
        return np.arange(n)
    if plan.policy in LENGTH_AWARE_POLICIES:
        return rank_positions(partition(plan, num_parts, NUM_STRETCHES), num_parts // 2)
    length = max(num_requests // NUM_STRETCHES, 1)
    starts = np.linspace(0, n - length, NUM_STRETCHES).astype(np.int64)
    return np.unique((starts[:, None] + np.arange(length)[None, :]).ravel())
