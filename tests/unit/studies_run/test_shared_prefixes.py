"""Whole runs over many documents with few questions each: a document is computed once, whatever is known."""

import numpy as np
import pytest

from blend_core.planner import PlanConfig, build_plan
from blend_core.segment_requests import SegmentRequests
from blend_core.simulator import simulate
from blend_core.specs import load_device_profile, model_spec_preset
from blend_core.studies.replanning import SampleReplanner
from blend_core.studies.study import study_limits
from blend_core.studies.workload import workload_figures

MODEL, DEVICE = model_spec_preset("llama-3.1-8b"), load_device_profile("a100-80g")
LIMITS = study_limits(MODEL, DEVICE)
NUM_DOCUMENTS = 120


def questions(num_each, document_tokens, num_output_tokens, *, max_tokens=None):
    """Documents that do not fit KV together, with own questions; lengths are known without a bound."""
    num = NUM_DOCUMENTS * num_each
    number = np.arange(num)
    output = np.resize(np.asarray(num_output_tokens), num)
    own = np.random.default_rng(0).integers(20, 200, num)
    requests = SegmentRequests(
        seq=number,
        segment_ids=np.stack((number // num_each, NUM_DOCUMENTS + number), axis=1).ravel(),
        segment_tokens=np.stack((np.full(num, document_tokens), own), axis=1).ravel(),
        offsets=2 * np.arange(num + 1),
        min_tokens=(output if max_tokens is None else np.zeros(num)).astype(np.int32),
        max_tokens=(output if max_tokens is None else np.resize(max_tokens, num)).astype(np.int32),
    )
    return requests, output


def run(policy, requests, output, *, overlap):
    config = PlanConfig(policy, LIMITS.block_size, 0, max_num_batched_tokens=LIMITS.max_num_batched_tokens)
    plan = build_plan(requests, MODEL, DEVICE, config)
    feedback = SampleReplanner(requests, plan, MODEL, DEVICE, config)
    return simulate(requests, output, plan, policy, MODEL, DEVICE, LIMITS, overlap=overlap, feedback=feedback)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sequential"])
@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(questions(4, 12_000, [64]), id="known"),
        pytest.param(questions(2, 12_000, [1]), id="known, one token"),
        pytest.param(questions(4, 12_000, [6, 150], max_tokens=[8, 256]), id="hidden, two bounds"),
        pytest.param(
            questions(4, 16_300, [10, 300, 40, 90], max_tokens=[512]), id="hidden, two kinds by length"
        ),
    ],
)
def test_a_document_is_computed_once_and_no_time_is_lost(workload, overlap):
    requests, output = workload
    figures = workload_figures(requests, output, MODEL, DEVICE, LIMITS.block_size)
    ours, dfs = (run(policy, requests, output, overlap=overlap) for policy in ("density_matched", "dfs"))
    assert ours.prefix_sharing >= 0.98 * figures.prefix_sharing
    assert ours.duration_s <= 1.03 * dfs.duration_s
