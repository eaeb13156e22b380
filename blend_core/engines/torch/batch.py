"""One step as tensors: which rows are computed, where their KV goes, what they attend to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Decoding rows share a padded group unless the padding would exceed this share of the longest row.
_MAX_PADDING = 0.3
_MIN_GROUP_ROWS = 4


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """Rows of one request in a step, as the scheduler sees them.

    Attributes:
        token_ids: tokens to compute, at positions from `num_computed_tokens` on.
        num_computed_tokens: tokens of the request whose KV is there already.
        block_ids: the request's blocks, enough for all of these tokens.
        samples: whether the last row yields a token.
    """

    token_ids: Sequence[int]
    num_computed_tokens: int
    block_ids: Sequence[int]
    samples: bool


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """Consecutive rows of one prompt.

    Attributes:
        start: first row.
        num_tokens: rows.
        block_ids: `(num_blocks,)` int64, blocks up to the last row's position.
        num_context_tokens: KV tokens that the last row attends to.
        mask: `(num_tokens, num_context_tokens)`, added to scores; None where plain causal attention does.
    """

    start: int
    num_tokens: int
    block_ids: Tensor
    num_context_tokens: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding rows of similar context length.

    Attributes:
        rows: `(num_rows,)` int64, rows of the step.
        block_ids: `(num_rows * num_blocks,)` int64, padded with block 0.
        num_blocks: blocks of each row, padding included.
        mask: `(num_rows, 1, num_blocks * block_size)` float32, 0 or minus infinity.
    """

    rows: Tensor
    block_ids: Tensor
    num_blocks: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Input of one forward pass. Decoding rows come first.

    Attributes:
        token_ids: `(num_tokens,)` int64.
        positions: `(num_tokens,)` int64.
        slots: `(num_tokens,)` int64, where each row's KV is written: `block * block_size + offset`.
        decode_groups: decoding rows.
        prefill_segments: the other rows.
        sampled_rows: `(num_sampled,)` int64, rows that yield a token, in the order of the scheduled requests.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    decode_groups: tuple[DecodeGroup, ...]
    prefill_segments: tuple[PrefillSegment, ...]
    sampled_rows: Tensor


def build_batch(
    decodes: Sequence[ScheduledRows],
    prefills: Sequence[ScheduledRows],
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> StepBatch:
    """Lays out a step: `decodes` have one row each, `prefills` any number."""
    token_ids: list[int] = []
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    sampled: list[int] = []
    segments: list[PrefillSegment] = []
    for index, rows in enumerate([*decodes, *prefills]):
        start, num_tokens = len(token_ids), len(rows.token_ids)
        at = np.arange(rows.num_computed_tokens, rows.num_computed_tokens + num_tokens)
        blocks = np.asarray(rows.block_ids, dtype=np.int64)
        token_ids.extend(rows.token_ids)
        positions.append(at)
        slots.append(blocks[at // block_size] * block_size + at % block_size)
        if rows.samples:
            sampled.append(start + num_tokens - 1)
        if index >= len(decodes):
            segments.append(_segment(start, rows, blocks, block_size, device, dtype))
    return StepBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        slots=torch.from_numpy(np.concatenate(slots)).to(device),
        decode_groups=tuple(_group_decodes(decodes, block_size, device)),
        prefill_segments=tuple(segments),
        sampled_rows=torch.tensor(sampled, dtype=torch.int64, device=device),
    )


def _segment(
    start: int,
    rows: ScheduledRows,
    blocks: np.ndarray,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> PrefillSegment:
    num_tokens = len(rows.token_ids)
    num_context = rows.num_computed_tokens + num_tokens
    mask = None
    if rows.num_computed_tokens:
        mask = torch.full((num_tokens, num_context), float("-inf"), dtype=dtype, device=device)
        mask.triu_(diagonal=rows.num_computed_tokens + 1)
    num_blocks = -(-num_context // block_size)
    return PrefillSegment(
        start, num_tokens, torch.from_numpy(blocks[:num_blocks]).to(device), num_context, mask
    )


def _group_decodes(
    decodes: Sequence[ScheduledRows], block_size: int, device: torch.device
) -> list[DecodeGroup]:
    """Groups rows by length, longest first, so that little of a padded group is padding."""
    lengths = np.array([rows.num_computed_tokens + 1 for rows in decodes], dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    groups: list[DecodeGroup] = []
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        end = start + 1
        while end < len(order) and (
            end - start < _MIN_GROUP_ROWS or lengths[order[end]] >= (1 - _MAX_PADDING) * longest
        ):
            end += 1
        members = order[start:end]
        num_blocks = int(-(-longest // block_size))
        table = np.zeros((len(members), num_blocks), dtype=np.int64)
        for row, member in enumerate(members):
            blocks = decodes[member].block_ids[: -(-int(lengths[member]) // block_size)]
            table[row, : len(blocks)] = blocks
        hidden = np.arange(num_blocks * block_size)[None, :] >= lengths[members][:, None]
        mask = np.where(hidden, np.float32("-inf"), np.float32(0))[:, None, :]
        groups.append(
            DecodeGroup(
                rows=torch.from_numpy(np.ascontiguousarray(members)).to(device),
                block_ids=torch.from_numpy(table.reshape(-1)).to(device),
                num_blocks=num_blocks,
                mask=torch.from_numpy(mask).to(device),
            )
        )
        start = end
    return groups
