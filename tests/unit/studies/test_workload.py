"""Sharing and figures of a workload."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from blend_core.performance import practical_optimum_s
from blend_core.segment_requests import SegmentRequests
from blend_core.studies.mixes import Setting
from blend_core.studies.workload import seen_tokens, workload_figures


def requests_of(paths: list[list[int]]) -> SegmentRequests:
    """Segment `i` has `i + 1` tokens."""
    ids = np.array([segment for path in paths for segment in path], dtype=np.int64)
    n = len(paths)
    return SegmentRequests(
        seq=np.arange(n),
        segment_ids=ids,
        segment_tokens=ids + 1,
        offsets=np.cumsum([0, *map(len, paths)], dtype=np.int64),
        min_tokens=np.zeros(n, dtype=np.int32),
        max_tokens=np.full(n, 10, dtype=np.int32),
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=30), st.sampled_from([1, 2, 4]))
def test_seen_tokens_equal_their_plain_twin(tails: list[int], block_size: int) -> None:
    # A segment has one parent in a trie: the tail decides what comes before it.
    parents = {0: [], 1: [0], 2: [0], 3: [0, 2], 4: []}
    paths = [[*parents[tail], tail] for tail in tails]
    seen: set[int] = set()
    expected = []
    for path in paths:
        common = sum(segment + 1 for segment in path if segment in seen)
        common = min(common, sum(segment + 1 for segment in path) - 1)
        expected.append(common - common % block_size)
        seen.update(path)
    assert seen_tokens(requests_of(paths), block_size).tolist() == expected


def test_figures_count_every_shared_segment_once(setting: Setting) -> None:
    requests = requests_of([[99, 3], [99, 4], [50]])
    output = np.array([5, 6, 7])
    figures = workload_figures(requests, output, setting.model, setting.device, 16)
    assert figures.prefix_sharing == 96 / (104 + 105 + 51)
    optimum = practical_optimum_s(setting.model, setting.device, [104, 105, 51], [0, 96, 0], output)
    assert figures.optimum_s == optimum
    assert figures.density == figures.compute_s / figures.memory_s
