"""A small workload of three kinds, in the setting of the studies."""

import numpy as np
import pytest

from blend_core.segment_requests import SegmentRequests
from blend_core.specs import load_device_profile, model_spec_preset
from blend_core.studies.workload import Workload


def workload_of(num_chat=300, num_long=40, num_shared=800, *, preset=True, seed=0, longest=1_500):
    """Chat-like prompts, short prompts with long answers, and questions behind ten common beginnings."""
    rng = np.random.default_rng(seed)
    rows = [
        ([(10 + i, int(rng.integers(200, 2_000)))], int(rng.integers(5, 60)), 4_096) for i in range(num_chat)
    ]
    for i in range(num_long):
        output = int(rng.integers(longest // 3, longest))
        rows.append(([(5_000 + i, 60)], output, output if preset else 4_096))
    for i in range(num_shared):
        stem = int(rng.integers(0, 10))
        rows.append(([(stem, 160 + 16 * stem), (10_000 + i, int(rng.integers(20, 120)))], 2, 4_096))
    order = rng.permutation(len(rows))
    rows = [rows[place] for place in order]
    bounds = np.array([bound for _, _, bound in rows], dtype=np.int32)
    output = np.array([output for _, output, _ in rows])
    return Workload(
        name="small",
        requests=SegmentRequests(
            seq=np.arange(len(rows)),
            segment_ids=np.array([segment for path, _, _ in rows for segment, _ in path]),
            segment_tokens=np.array([tokens for path, _, _ in rows for _, tokens in path]),
            offsets=np.concatenate(([0], np.cumsum([len(path) for path, _, _ in rows]))),
            min_tokens=np.where(bounds == output, bounds, 0).astype(np.int32),
            max_tokens=bounds,
        ),
        num_output_tokens=output,
        data="generated",
    )


@pytest.fixture
def make_workload():
    return workload_of


@pytest.fixture(scope="session")
def make_workload_of():
    """The same for property tests, which may not use fixtures of a single test."""
    return workload_of


@pytest.fixture
def model():
    return model_spec_preset("llama-3.1-8b")


@pytest.fixture
def device():
    return load_device_profile("a100-80g")
