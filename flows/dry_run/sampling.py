"""The part of a large plan that stands for all of it in a simulation, and what it takes for all of it."""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from blend_core.partition import partition, rank_positions
from blend_core.performance import StepTimeModel
from blend_core.plan import Plan
from blend_core.planner import LENGTH_AWARE_POLICIES
from blend_core.simulator import SimulationResult
from flows.dry_run.target import Target

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


def duration_of_whole_s(
    result: SimulationResult, target: Target, scale: float, min_num_steps: float, *, overlap: bool
) -> float:
    """Returns the seconds that a whole plan takes, from a simulation of a sample of it.

    What grows with the work is scaled by it: computing tokens and reading KV. The rest of a step, launches
    and weights, takes as long for one token as for many, and a long answer has as many steps in a sample as
    in the whole: that rest is scaled by the number of steps, no fewer than the sample's.

    Args:
        result: of the sample.
        target: what it was simulated on.
        scale: work of the whole over work of the sample.
        min_num_steps: steps that the whole takes at least.
        overlap: as it was simulated.
    """
    times = StepTimeModel.of(target.model, target.device)
    work_s = sum(
        times.combined_s(
            times.gemm_s_per_token * (window.num_prefill_tokens + window.num_decode_tokens)
            + times.prefill_s_per_token_sq * window.prefill_tokens_sq,
            times.decode_s_per_kv_token * window.decode_kv_tokens,
            overlap=overlap,
        )
        for window in result.windows
    )
    steps_scale = max(min_num_steps / result.num_steps, 1.0)
    return work_s * scale + (result.duration_s - work_s) * steps_scale
