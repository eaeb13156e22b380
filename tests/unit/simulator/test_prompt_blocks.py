"""Blocks that prompts share are found by hash; a comparison of all prefixes says the same."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blend_core.request import RequestArrays
from blend_core.simulation import prompts as module
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


def whole_prefixes(prompt, block_size):
    return [tuple(prompt[:end]) for end in range(block_size, len(prompt) + 1, block_size)]


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=10),
    block_size=st.integers(1, 4),
)
def test_ids_are_equal_exactly_where_prefixes_are(prompts, block_size):
    blocks = PromptBlocks.of(arrays(prompts), block_size)
    owners = {}
    for row, prompt in enumerate(prompts):
        for prefix in whole_prefixes(prompt, block_size):
            owners.setdefault(prefix, []).append(row)
    prefix_of = {}
    for row, prompt in enumerate(prompts):
        shared = [prefix for prefix in whole_prefixes(prompt, block_size) if len(owners[prefix]) > 1]
        ids = blocks.ids_of(row)
        assert len(ids) == len(shared) == blocks.num_shared_blocks(row)
        for block, prefix in zip(ids, shared, strict=True):
            assert prefix_of.setdefault(block, prefix) == prefix
    assert sorted(prefix_of) == list(range(blocks.num_ids))


def test_hashing_in_pieces_gives_the_same(monkeypatch):
    prompts = [[seq % 3] * (20 + seq % 5) for seq in range(40)]
    whole = PromptBlocks.of(arrays(prompts), 4)
    monkeypatch.setattr(module, "_CHUNK_TOKENS", 50)
    pieces = PromptBlocks.of(arrays(prompts), 4)
    assert (whole.shared_ids == pieces.shared_ids).all()
    assert (whole.offsets == pieces.offsets).all()


def test_a_prompt_alone_shares_nothing():
    assert PromptBlocks.of(arrays([list(range(100))]), 4).num_ids == 0
