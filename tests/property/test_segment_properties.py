"""Segment paths against the token ids that they stand for."""

from dataclasses import fields

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from blend_core.planner import PLANNED_POLICIES, PlanConfig, build_plan
from blend_core.prefix_tree import PrefixTree, build_prefix_tree, without_leaves
from blend_core.request import RequestArrays
from blend_core.segment_requests import SegmentRequests
from blend_core.specs import load_device_profile, model_spec_preset

MODEL = model_spec_preset("llama-3.1-8b")
DEVICE = load_device_profile("a100-80g")

TOKENS_OF_SEGMENT = {0: 5, 1: 1, 2: 3, 7: 4, 300: 2}
block_sizes = st.sampled_from([1, 2, 3, 4])


@st.composite
def segment_jobs(draw: st.DrawFn) -> SegmentRequests:
    """Paths over few segments, so that they share, repeat and begin one another."""
    paths = draw(
        st.lists(st.lists(st.sampled_from(list(TOKENS_OF_SEGMENT)), min_size=1, max_size=5), max_size=25)
    )
    n = len(paths)
    upper = np.array(draw(st.lists(st.integers(1, 500), min_size=n, max_size=n)), dtype=np.int32)
    preset = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=np.bool_)
    flat = [segment for path in paths for segment in path]
    return SegmentRequests(
        seq=np.array(draw(st.permutations(range(n))), dtype=np.int64),
        segment_ids=np.array(flat, dtype=np.int64),
        segment_tokens=np.array([TOKENS_OF_SEGMENT[segment] for segment in flat], dtype=np.int64),
        offsets=np.cumsum([0, *map(len, paths)], dtype=np.int64),
        min_tokens=np.where(preset, upper, 0).astype(np.int32),
        max_tokens=upper,
    )


def as_tokens(requests: SegmentRequests) -> RequestArrays:
    """Each token of a segment is the segment's id, so two segments differ from their first token on."""
    token_ids = np.repeat(requests.segment_ids, requests.segment_tokens).astype(np.int32)
    return RequestArrays(
        seq=requests.seq,
        token_ids=token_ids,
        offsets=np.concatenate(([0], np.cumsum(requests.num_prompt_tokens))).astype(np.int64),
        min_tokens=requests.min_tokens,
        max_tokens=requests.max_tokens,
    )


def assert_equal(one: PrefixTree, other: PrefixTree) -> None:
    for field in fields(PrefixTree):
        assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name


@settings(deadline=None)
@given(segment_jobs(), block_sizes)
def test_tree_of_segments_equals_that_of_their_tokens(requests: SegmentRequests, block_size: int) -> None:
    requests.check_integrity()
    tree = build_prefix_tree(requests, block_size)
    tree.check_integrity()
    assert_equal(tree, build_prefix_tree(as_tokens(requests), block_size))


@settings(max_examples=50, deadline=None)
@given(segment_jobs().filter(len), block_sizes, st.sampled_from(PLANNED_POLICIES))
def test_plan_of_segments_equals_that_of_their_tokens(
    requests: SegmentRequests, block_size: int, policy: str
) -> None:
    plans = [
        build_plan(one, MODEL, DEVICE, PlanConfig(policy, block_size))
        for one in (requests, as_tokens(requests))
    ]
    assert plans[0].to_arrow() == plans[1].to_arrow()


@settings(deadline=None)
@given(segment_jobs().filter(len), block_sizes, st.randoms(use_true_random=False))
def test_leaving_leaves_out_equals_building_without_them(
    requests: SegmentRequests, block_size: int, random: object
) -> None:
    is_left_out = np.array([random.random() < 0.4 for _ in range(len(requests))])  # type: ignore[attr-defined]
    rest = without_leaves(build_prefix_tree(requests, block_size), requests, is_left_out)
    kept = np.flatnonzero(~is_left_out)
    built = build_prefix_tree(requests.take(kept), block_size)
    assert rest.leaf_row.tolist() == kept[built.leaf_row].tolist()
    for name in ("seq", "num_shared_tokens", "parent", "depth", "leaf_start", "leaf_end", "leaf_parent"):
        assert np.array_equal(getattr(rest, name), getattr(built, name)), name
