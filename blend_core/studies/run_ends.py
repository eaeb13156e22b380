"""The two ends of a run: while KV fills, and while what began last runs out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from blend_core.engines.base import StepWindow
from blend_core.performance import StepTimeModel
from blend_core.policies.base import EngineLimits

FULL_SHARE: Final = 0.9
"""KV usage from which on it counts as full."""


@dataclass(frozen=True, slots=True)
class RunEnds:
    """Seconds of a run outside the stretch in which KV is full.

    Attributes:
        start_s: until KV is full for the first time; all of a run whose KV never is.
        end_s: after it was full for the last time.
    """

    start_s: float
    end_s: float


def run_ends(windows: Sequence[StepWindow]) -> RunEnds:
    """Returns the ends of a run by its windows, in order; to a window exactly."""
    began, ended = windows[0].started_at, windows[-1].started_at + windows[-1].duration_s
    full = [window for window in windows if window.kv_usage >= FULL_SHARE]
    if not full:
        return RunEnds(ended - began, 0.0)
    return RunEnds(full[0].started_at - began, ended - full[-1].started_at - full[-1].duration_s)


def least_start_s(times: StepTimeModel, limits: EngineLimits, longest_prompt_tokens: int) -> float:
    """Returns seconds until KV can be full at the earliest: its tokens are computed in steps.

    A step of `n` tokens takes at least `fixed + n per_token`, and `n` is at most `max_num_batched_tokens`.
    Blocks count from admission on, so one prompt may not be computed yet when KV is full, and the last block
    of every request in flight may hold one token. The other end has no such bound: all that runs may end in
    one step.
    """
    num_blank = longest_prompt_tokens + (limits.block_size - 1) * limits.max_num_seqs
    num_tokens = max(0.0, FULL_SHARE * limits.num_blocks * limits.block_size - num_blank)
    num_steps = num_tokens / limits.max_num_batched_tokens
    return num_steps * times.gemm_fixed_s + num_tokens * times.gemm_s_per_token
