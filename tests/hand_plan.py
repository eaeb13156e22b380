"""Plans of a few numbers."""

import numpy as np

from blend_core.performance import StepTimeModel
from blend_core.plan import LengthGroup, Plan, PlanSummary

# What a step takes whatever it computes is little, so that its tokens decide how long it takes.
STEP_TIMES = StepTimeModel(1e-5, 1e-5, 1e-5, 1e-9, 1e-6, 0.15)


def plan_of(requests, *, revision=0, lead=(), block_size=4, shared=None, kinds=None, step_times=STEP_TIMES):
    """A plan of `(seq, prompt tokens, output tokens, density)` in that order; memory is one second each.

    `kinds` numbers the kind of those whose length is not known; -1 for the others.
    """
    seqs, prompts, outputs, densities = (list(column) for column in zip(*requests, strict=True))
    num = len(seqs)
    summary = PlanSummary("m", "d", block_size, num, sum(prompts), sum(outputs), 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    return Plan(
        revision=revision,
        policy="dual_scan",
        summary=summary,
        seq=np.array(seqs, dtype=np.int64),
        num_prompt_tokens=np.array(prompts, dtype=np.int32),
        num_shared_tokens=np.array(shared or [0] * num, dtype=np.int32),
        max_tokens=np.array([1_000] * num, dtype=np.int32),
        estimated_output_tokens=np.array(outputs, dtype=np.float64),
        estimated_output_tokens_sq=np.array(outputs, dtype=np.float64) ** 2,
        compute_s=np.array(densities, dtype=np.float64),
        memory_s=np.ones(num),
        lead=np.isin(seqs, list(lead)),
        length_group=np.array(kinds or [-1] * num, dtype=np.int32),
        length_groups=tuple(LengthGroup(1_000) for _ in range(max(kinds or [-1]) + 1)),
        step_times=step_times,
        progress=np.zeros(0),
        planned_density=np.zeros(0),
    )
