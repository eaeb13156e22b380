"""Decoding rows in groups that attend together: little padding, a shared prefix read once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

# One more group costs about as much per layer as reading this many tokens of KV (measured on two CPU cores).
_GROUP_COST_TOKENS = 1024


class DecodingRow(Protocol):
    """What grouping needs to know of a row."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of the request whose KV is there already; the row's own is the next."""

    @property
    def block_ids(self) -> Sequence[int]:
        """The request's blocks."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding rows that begin with the same blocks, possibly none, and go on with similar lengths.

    Attributes:
        rows: `(num_rows,)` int64, rows of the step.
        shared_block_ids: `(num_shared,)` int64, whole blocks that every row attends to.
        own_block_ids: `(num_rows * num_own,)` int64, the blocks after those, padded with the row's own
            last one: what is masked is read all the same, and no row may read another's numbers.
        mask: `(num_rows, 1, num_own * block_size)` float32 over own tokens, 0 or minus infinity.
    """

    rows: Tensor
    shared_block_ids: Tensor
    own_block_ids: Tensor
    mask: Tensor


def group_decodes(
    decodes: Sequence[DecodingRow], block_size: int, device: torch.device
) -> tuple[DecodeGroup, ...]:
    """Puts every row into one group."""
    return tuple(
        _group(decodes, members, num_shared, block_size, device)
        for cluster, num_shared in _clusters(decodes, block_size)
        for members in _similar_lengths(decodes, cluster)
    )


def _clusters(decodes: Sequence[DecodingRow], block_size: int) -> list[tuple[list[int], int]]:
    """Rows with as many leading blocks in common as make it worth their while; the others share nothing."""
    order = sorted(range(len(decodes)), key=lambda row: (*decodes[row].block_ids, row))
    clusters: list[tuple[list[int], int]] = []
    alone: list[int] = []
    start = 0
    while start < len(order):
        first = decodes[order[start]]
        num_shared = first.num_computed_tokens // block_size
        end = start + 1
        while end < len(order):
            num_common = _num_common(first, decodes[order[end]], num_shared, block_size)
            if not num_common or (end - start > 1 and 2 * num_common < num_shared):
                break
            num_shared = num_common
            end += 1
        members = order[start:end]
        if (len(members) - 1) * num_shared * block_size > _GROUP_COST_TOKENS:
            clusters.append((members, num_shared))
        else:
            alone += members
        start = end
    return [*clusters, (alone, 0)] if alone else clusters


def _num_common(one: DecodingRow, other: DecodingRow, limit: int, block_size: int) -> int:
    """Leading blocks that both rows have and neither writes to, up to a limit."""
    limit = min(limit, other.num_computed_tokens // block_size)
    if one.block_ids[:limit] == other.block_ids[:limit]:
        return limit
    pairs = zip(one.block_ids, other.block_ids, strict=False)
    return next(index for index, (a, b) in enumerate(pairs) if a != b)


def _similar_lengths(decodes: Sequence[DecodingRow], cluster: list[int]) -> list[list[int]]:
    """Splits where the padding would cost more than another group does; longest first."""
    groups: list[list[int]] = []
    longest = num_padding = 0
    for row in sorted(cluster, key=lambda row: (-decodes[row].num_computed_tokens, row)):
        length = decodes[row].num_computed_tokens
        num_padding += longest - length
        if not groups or num_padding > _GROUP_COST_TOKENS:
            groups.append([])
            longest, num_padding = length, 0
        groups[-1].append(row)
    return groups


def _group(
    decodes: Sequence[DecodingRow],
    members: list[int],
    num_shared: int,
    block_size: int,
    device: torch.device,
) -> DecodeGroup:
    own_lengths = (
        np.array([decodes[row].num_computed_tokens + 1 for row in members]) - num_shared * block_size
    )
    num_own = int(-(-own_lengths.max() // block_size))
    table = np.empty((len(members), num_own), dtype=np.int64)
    for index, row in enumerate(members):
        blocks = decodes[row].block_ids[num_shared : num_shared + num_own]
        table[index, : len(blocks)] = blocks
        table[index, len(blocks) :] = blocks[-1]
    hidden = np.arange(num_own * block_size)[None, :] >= own_lengths[:, None]
    mask = np.where(hidden, np.float32("-inf"), np.float32(0))[:, None, :]
    shared = np.array(decodes[members[0]].block_ids[:num_shared], dtype=np.int64)
    return DecodeGroup(
        rows=torch.tensor(members, dtype=torch.int64, device=device),
        shared_block_ids=torch.from_numpy(shared).to(device),
        own_block_ids=torch.from_numpy(table.reshape(-1)).to(device),
        mask=torch.from_numpy(mask).to(device),
    )
