"""A plan of equal requests for two ranks, and what tests do with it."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from blend_core.engines.base import RequestFinished
from blend_core.performance import StepTimeModel
from blend_core.plan import Plan, PlanSummary, frozen

NUM_REQUESTS = 64

# A plan without samples is not planned anew, and the engine here looks at no request.
NO_SHARDS: Any = SimpleNamespace(fetch=None)
NOTHING: Any = None


class Seconds:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plan_of(count: int, revision: int = 0) -> Plan:
    """A whole plan of equal requests without samples."""
    per_request = frozen(np.ones(count))
    tokens = frozen(np.full(count, 10, dtype=np.int32))
    return Plan(
        revision=revision,
        policy="fcfs",
        summary=PlanSummary("tiny", "cpu", 4, count, 10 * count, 5.0, 1.0, 0.5, 2.0, 0.5, 0.4, 1.0, None),
        seq=frozen(np.arange(count, dtype=np.int64)),
        num_prompt_tokens=tokens,
        num_shared_tokens=frozen(np.zeros(count, dtype=np.int32)),
        max_tokens=tokens,
        estimated_output_tokens=per_request,
        estimated_output_tokens_sq=per_request,
        compute_s=per_request,
        memory_s=per_request,
        lead=frozen(np.zeros(count, dtype=np.bool_)),
        length_group=frozen(np.full(count, -1, dtype=np.int32)),
        length_groups=(),
        step_times=StepTimeModel(1e-3, 1e-5, 2e-3, 1e-9, 1e-7, 0.15),
        progress=frozen(np.array([0.0, 1.0])),
        planned_density=frozen(np.array([1.0, 1.0])),
    )


def answer(seq: int) -> RequestFinished:
    return RequestFinished(seq, 0, "Paris.", (1, 2, 3), "stop", 10, 4, 1_700_000_000.25, 1_700_000_001.5)
