"""The simulator with its counts, jumps and totals does exactly what the plain step-by-step engine does."""

import numpy as np
import pytest
from cases import DEVICE, MODEL, Job, ListSource, jobs
from fake_engine import FakeEngine
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blend_core.engines.base import RequestFinished
from blend_core.policies.base import EngineLimits
from blend_core.policies.factory import POLICY_NAMES, make_policy
from blend_core.simulator import simulate

COUNTS = (
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_cached_tokens",
    "num_recomputed_tokens",
    "prefill_tokens_sq",
    "decode_kv_tokens",
    "num_preempted",
    "num_finished",
)


EVICTED_BEFORE_ITS_COPY = Job(
    [
        *([3], [3], [3], [3, 3, 3, 4, 3, 3, 3, 3, 3, 3, 3, 3], [3, 4, 4, 4, 3], [3, 3, 3, 3, 3, 3, 3], [3]),
        *([3, 4, 4, 4], [3], [3], [3], [3], [3], [3, 4, 4, 4]),
    ],
    [1, 1, 8, 3, 1, 15, 1, 11, 1, 2, 3, 1, 4, 2],
    [1.0, 1.0, 16.0, 3.0, 1.0, 60.0, 1.0, 22.0, 1.0, 4.0, 3.0, 1.0, 8.0, 2.0],
    block_size=4,
)
"""A prompt ends with a cached block, which is evicted after it was admitted and before it is computed."""


@pytest.mark.parametrize("policy_name", POLICY_NAMES)
@given(
    job=jobs(),
    num_blocks=st.integers(5, 30),
    max_num_seqs=st.integers(1, 10),
    budget=st.integers(10, 24),
)
@example(job=EVICTED_BEFORE_ITS_COPY, num_blocks=14, max_num_seqs=8, budget=10)
@settings(max_examples=150, deadline=None)
def test_the_simulator_equals_single_steps(policy_name, job, num_blocks, max_num_seqs, budget):
    limits = EngineLimits(4, num_blocks, max_num_seqs, budget)
    plan = job.plan()
    # To the simulator every request is ready.
    fake = FakeEngine(limits, num_upcoming=len(job.prompts))
    events = list(
        fake.run(ListSource(job, plan), lambda plan, limits: make_policy(policy_name, plan, limits))
    )
    result = simulate(
        job.arrays(),
        np.array(job.output_tokens),
        plan,
        policy_name,
        MODEL,
        DEVICE,
        limits,
        overlap=True,
    )
    answered = [event for event in events if isinstance(event, RequestFinished)]
    assert result.num_steps == fake.counts["num_steps"]
    totals = {name: sum(getattr(window, name) for window in result.windows) for name in COUNTS}
    assert totals == {name: fake.counts[name] for name in COUNTS}
    assert result.num_output_tokens == sum(event.num_output_tokens for event in answered)
    assert result.num_cached_tokens == sum(event.num_cached_tokens for event in answered)
    assert result.num_refused == len(events) - len(answered)
