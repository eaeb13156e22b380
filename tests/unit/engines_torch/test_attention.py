"""Decode attention over groups equals the plain softmax over each row's own context."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blend_core.engines.torch import decode_groups
from blend_core.engines.torch.attention import decode_attention
from blend_core.engines.torch.batch import ScheduledRows
from blend_core.engines.torch.kv_cache import GatherSpace, LayerCache

BLOCK_SIZE, KV_HEADS, GROUP, HEAD_SIZE = 4, 2, 3, 8
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def cheap_groups() -> Iterator[None]:
    """Few tokens are worth a group, so that small cases make all kinds of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_groups, "_GROUP_COST_TOKENS", 10)
        yield


def make_cache(num_blocks: int) -> LayerCache:
    cache = LayerCache((KV_HEADS, num_blocks, BLOCK_SIZE, HEAD_SIZE), CPU, torch.float32)
    generator = torch.Generator().manual_seed(0)
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    return cache


def plainly(query: torch.Tensor, cache: LayerCache, rows: ScheduledRows) -> torch.Tensor:
    """One row, one head after the other."""
    length = rows.num_computed_tokens + 1
    attended = torch.empty(KV_HEADS, GROUP, HEAD_SIZE)
    for head in range(KV_HEADS):
        keys = torch.cat([cache.keys[head, block] for block in rows.block_ids])[:length]
        values = torch.cat([cache.values[head, block] for block in rows.block_ids])[:length]
        weights = torch.softmax(query[head] @ keys.T / HEAD_SIZE**0.5, dim=-1)
        attended[head] = weights @ values
    return attended


def row(num_tokens: int, block_ids: list[int]) -> ScheduledRows:
    return ScheduledRows([7], num_tokens - 1, block_ids, samples=True)


def rows_of(shape: list[tuple[int, int, int]]) -> list[ScheduledRows]:
    """Rows from (family, blocks shared within the family, own tokens); every own block is another one."""
    rows, free = [], 60
    for family, num_shared, num_own in shape:
        num_blocks = -(-num_own // BLOCK_SIZE)
        shared = list(range(family * 20, family * 20 + num_shared))
        rows.append(row(num_shared * BLOCK_SIZE + num_own, shared + list(range(free, free + num_blocks))))
        free += num_blocks
    return rows


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(1, 40)),
        min_size=1,
        max_size=9,
    )
)
def test_grouped_attention_equals_plain_attention(shape: list[tuple[int, int, int]]) -> None:
    rows = rows_of(shape)
    cache = make_cache(60 + 9 * 10)
    query = torch.randn(len(rows), KV_HEADS, GROUP, HEAD_SIZE, generator=torch.Generator().manual_seed(1))
    groups = decode_groups.group_decodes(rows, BLOCK_SIZE, CPU)

    assert sorted(member for group in groups for member in group.rows.tolist()) == list(range(len(rows)))
    space = GatherSpace()
    for group in groups:
        attended = decode_attention(query[group.rows], cache, group, space)
        for index, member in enumerate(group.rows.tolist()):
            torch.testing.assert_close(attended[index], plainly(query[member], cache, rows[member]))


def test_rows_behind_one_prefix_read_it_once() -> None:
    rows = rows_of([(0, 8, 3), (1, 0, 30), (0, 8, 5), (0, 8, 1)])
    groups = decode_groups.group_decodes(rows, BLOCK_SIZE, CPU)

    shared = {tuple(group.rows.tolist()): group.shared_block_ids.tolist() for group in groups}
    assert shared[(2, 0, 3)] == list(range(8))
    assert shared[(1,)] == []


def test_a_long_row_does_not_pad_the_short_ones() -> None:
    rows = rows_of([(0, 0, 40), (1, 0, 3), (2, 0, 2), (0, 0, 39)])
    groups = decode_groups.group_decodes(rows, BLOCK_SIZE, CPU)

    assert [group.rows.tolist() for group in groups] == [[0, 3], [1, 2]]
