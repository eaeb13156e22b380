"""Whole runs over many documents with few questions each: a document is computed once, whatever is known."""

import numpy as np
import pytest

from blend_core.planner import PlanConfig, build_plan
from blend_core.segment_requests import SegmentRequests
from blend_core.simulator import simulate
from blend_core.specs import load_device_profile, model_spec_preset
from blend_core.studies.replanning import SampleReplanner
from blend_core.studies.study import study_limits

MODEL = model_spec_preset("llama-3.1-8b")
A100, L4 = load_device_profile("a100-80g"), load_device_profile("l4")
NUM_DOCUMENTS = 120


def questions(num_each, document_tokens, num_output_tokens, *, max_tokens=None, num_documents=NUM_DOCUMENTS):
    """Documents that do not fit KV together, with own questions; lengths are known without a bound."""
    num = num_documents * num_each
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


def run(policy, requests, output, device, *, overlap):
    limits = study_limits(MODEL, device)
    config = PlanConfig(policy, limits.block_size, 0, max_num_batched_tokens=limits.max_num_batched_tokens)
    plan = build_plan(requests, MODEL, device, config)
    feedback = SampleReplanner(requests, plan, MODEL, device, config)
    return simulate(requests, output, plan, policy, MODEL, device, limits, overlap=overlap, feedback=feedback)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sequential"])
@pytest.mark.parametrize(
    ("workload", "device"),
    [
        pytest.param(questions(4, 12_000, [64]), A100, id="known"),
        pytest.param(questions(2, 12_000, [1]), A100, id="known, one token"),
        pytest.param(questions(4, 12_000, [6, 150], max_tokens=[8, 256]), A100, id="hidden, two bounds"),
        pytest.param(
            questions(4, 16_300, [10, 300, 40, 90], max_tokens=[512]), A100, id="hidden, two kinds by length"
        ),
        # KV holds two documents: no question may wait for room for a document that is there.
        pytest.param(
            questions(4, 19_072, np.random.default_rng(1).integers(1, 400, 32), num_documents=8),
            L4,
            id="half of KV each",
        ),
    ],
)
def test_a_document_is_computed_once_and_no_time_is_lost(workload, device, overlap):
    requests, output = workload
    ours, dfs = (
        run(policy, requests, output, device, overlap=overlap) for policy in ("density_matched", "dfs")
    )
    assert ours.prefix_sharing >= 0.98 * dfs.prefix_sharing
    assert ours.duration_s <= 1.03 * dfs.duration_s
