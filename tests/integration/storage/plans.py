"""A small plan to store."""

import numpy as np

from blend_core.performance import StepTimeModel
from blend_core.plan import Plan, PlanSummary, frozen


def plan_of(revision: int) -> Plan:
    summary = PlanSummary("tiny", "cpu", 4, 2, 20, 8.0, 1.0, 0.5, 2.0, 0.5, 0.4, 1.0, None)
    return Plan(
        revision=revision,
        policy="fcfs",
        summary=summary,
        seq=frozen(np.array([1, 0], dtype=np.int64)),
        num_prompt_tokens=frozen(np.array([10, 10], dtype=np.int32)),
        num_shared_tokens=frozen(np.array([0, 4], dtype=np.int32)),
        max_tokens=frozen(np.array([20, 20], dtype=np.int32)),
        estimated_output_tokens=frozen(np.array([4.0, 4.0])),
        estimated_output_tokens_sq=frozen(np.array([20.0, 20.0])),
        compute_s=frozen(np.array([0.5, 0.5])),
        memory_s=frozen(np.array([0.25, 0.25])),
        lead=frozen(np.array([False, True])),
        length_group=frozen(np.full(2, -1, dtype=np.int32)),
        length_groups=(),
        step_times=StepTimeModel(1e-3, 1e-5, 2e-3, 1e-9, 1e-7, 0.15),
        progress=frozen(np.array([0.0, 1.0])),
        planned_density=frozen(np.array([2.0, 1.0])),
    )
