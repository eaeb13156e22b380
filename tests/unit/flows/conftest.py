from collections.abc import Callable

import numpy as np
import pytest

from blend_core.performance import StepTimeModel
from blend_core.plan import Plan, PlanSummary, frozen


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    """Makes whole plans of a few requests."""
    return _make_plan


def _make_plan(
    seqs: tuple[int, ...] = (4, 2, 0, 1, 3),
    *,
    revision: int = 0,
    shared: tuple[int, ...] | None = None,
    lead: tuple[int, ...] = (),
    memory_s: tuple[float, ...] | None = None,
    progress: tuple[float, ...] = (),
    planned_density: tuple[float, ...] = (),
) -> Plan:
    """A whole plan in blocks of 4 tokens: 20 prompt tokens and 1 s of compute for each request."""
    count = len(seqs)
    summary = PlanSummary(
        model="tiny",
        device="cpu",
        block_size=4,
        num_requests=count,
        num_prompt_tokens=20 * count,
        estimated_output_tokens=5.0 * count,
        compute_s=1.0 * count,
        memory_s=1.0 * count,
        density=1.0,
        prefix_sharing_best=0.4,
        prefix_sharing_planned=0.4,
        optimum_s=5.0,
    )
    plan = Plan(
        revision=revision,
        policy="dual_scan",
        summary=summary,
        seq=frozen(np.array(seqs, dtype=np.int64)),
        num_prompt_tokens=frozen(np.full(count, 20, dtype=np.int32)),
        num_shared_tokens=frozen(np.array(shared or [0] * count, dtype=np.int32)),
        max_tokens=frozen(np.full(count, 10, dtype=np.int32)),
        estimated_output_tokens=frozen(np.full(count, 5.0)),
        estimated_output_tokens_sq=frozen(np.full(count, 30.0)),
        compute_s=frozen(np.ones(count)),
        memory_s=frozen(np.array(memory_s or [1.0] * count)),
        lead=frozen(np.isin(seqs, lead)),
        length_group=frozen(np.full(count, -1, dtype=np.int32)),
        length_groups=(),
        step_times=StepTimeModel(1e-3, 1e-5, 2e-3, 1e-9, 1e-7, 0.15),
        progress=frozen(np.array(progress, dtype=np.float64)),
        planned_density=frozen(np.array(planned_density, dtype=np.float64)),
    )
    plan.check_integrity()
    return plan
