"""Plans of a few numbers and a view that a test sets by hand."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from blend_core.performance import StepTimeModel
from blend_core.plan import LengthGroup, Plan, PlanSummary

# Weights are read in the fixed part of a step, so that computing decides how long one takes.
STEP_TIMES = StepTimeModel(1e-3, 1e-5, 1e-3, 1e-9, 1e-6, 0.15)


@dataclass
class HandView:
    """An `EngineView` that is what the test says."""

    num_free_blocks: int = 1_000_000
    num_running: int = 0
    num_decoding: int = 0
    held: dict = field(default_factory=dict)
    absent: set = field(default_factory=set)

    def num_held_blocks(self, seq):
        return self.held.get(seq, 0)

    def is_ready(self, seq):
        return seq not in self.absent


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


@pytest.fixture
def make_plan():
    return plan_of


@pytest.fixture
def view():
    return HandView()
