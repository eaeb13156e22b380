"""Runs of blocks that prompts share are found in a tree; a comparison of all prefixes says the same."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from blend_core.request import RequestArrays
from blend_core.segment_requests import SegmentRequests
from blend_core.simulation.prompts import PromptBlocks


def arrays(prompts):
    lengths = [len(prompt) for prompt in prompts]
    return RequestArrays(
        seq=np.arange(len(prompts), dtype=np.int64),
        token_ids=np.array([token for prompt in prompts for token in prompt], dtype=np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        min_tokens=np.ones(len(prompts), dtype=np.int32),
        max_tokens=np.ones(len(prompts), dtype=np.int32),
    )


def segments(paths, num_tokens):
    return SegmentRequests(
        seq=np.arange(len(paths), dtype=np.int64),
        segment_ids=np.array([segment for path in paths for segment in path], dtype=np.int64),
        segment_tokens=np.array([num_tokens[segment] for path in paths for segment in path], dtype=np.int64),
        offsets=np.concatenate([[0], np.cumsum([len(path) for path in paths])]).astype(np.int64),
        min_tokens=np.ones(len(paths), dtype=np.int32),
        max_tokens=np.ones(len(paths), dtype=np.int32),
    )


def whole_prefixes(prompt, block_size):
    return [tuple(prompt[:end]) for end in range(block_size, len(prompt) + 1, block_size)]


prompt_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=10)


@given(prompts=prompt_lists, block_size=st.integers(1, 4))
@settings(deadline=None)
def test_runs_are_equal_exactly_where_prefixes_are(prompts, block_size):
    blocks = PromptBlocks.of(arrays(prompts), block_size)
    owners = {}
    for row, prompt in enumerate(prompts):
        for prefix in whole_prefixes(prompt, block_size):
            owners.setdefault(prefix, set()).add(row)
    stands_for = {}
    for row, prompt in enumerate(prompts):
        shared = [prefix for prefix in whole_prefixes(prompt, block_size) if len(owners[prefix]) > 1]
        assert blocks.num_shared_blocks()[row] == len(shared)
        first = 0
        for run in blocks.path(row):
            last = first + int(blocks.run_blocks[run])
            # A run is one stretch of one prefix, whose blocks all have the same owners.
            assert stands_for.setdefault(run, (first, shared[last - 1])) == (first, shared[last - 1])
            assert len({frozenset(owners[prefix]) for prefix in shared[first:last]}) == 1
            first = last
        assert first == len(shared)
    assert sorted(stands_for) == list(range(len(blocks.run_blocks)))


@given(prompts=prompt_lists, block_size=st.integers(1, 4))
@settings(deadline=None)
def test_the_last_block_of_a_prompt_is_a_run_of_its_own(prompts, block_size):
    blocks = PromptBlocks.of(arrays(prompts), block_size)
    for row, prompt in enumerate(prompts):
        path = blocks.path(row)
        if path and blocks.num_shared_blocks()[row] * block_size == len(prompt):
            assert blocks.run_blocks[path[-1]] == 1


@given(
    paths=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=8),
    num_tokens=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    block_size=st.integers(1, 4),
)
@settings(deadline=None)
def test_segments_are_like_their_tokens(paths, num_tokens, block_size):
    # A text of its own for each segment, so that different ones differ in their first token.
    texts = [[segment * 10 + place for place in range(length)] for segment, length in enumerate(num_tokens)]
    by_segments = PromptBlocks.of(segments(paths, num_tokens), block_size)
    by_tokens = PromptBlocks.of(
        arrays([[token for segment in path for token in texts[segment]] for path in paths]), block_size
    )
    assert (by_segments.num_prompt_tokens == by_tokens.num_prompt_tokens).all()
    assert (by_segments.run_blocks == by_tokens.run_blocks).all()
    assert by_segments.paths == by_tokens.paths
    assert (by_segments.path_of_row == by_tokens.path_of_row).all()


def test_a_long_shared_prompt_is_a_path_of_few_runs():
    stem = list(range(4_000))
    blocks = PromptBlocks.of(arrays([[*stem, -1], [*stem, -2], [*stem[:2_000], -3]]), 4)
    assert [len(blocks.path(row)) for row in range(3)] == [2, 2, 1]
    assert blocks.run_blocks.tolist() == [500, 500]


def test_a_prompt_alone_shares_nothing():
    assert len(PromptBlocks.of(arrays([list(range(100))]), 4).run_blocks) == 0
