"""One step as tensors: which rows are computed, where their KV goes, what they attend to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blend_core.engines.torch.decode_groups import DecodeGroup, group_decodes


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
class StepBatch:
    """Input of one forward pass. Decoding rows come first.

    Attributes:
        token_ids: `(num_tokens,)` int64.
        positions: `(num_tokens,)` int64.
        slots: `(num_tokens,)` int64, where each row's KV is written: `block * block_size + offset`.
        opened_block_ids: `(num_opened,)` int64, blocks that this step begins and does not fill.
        decode_groups: decoding rows.
        prefill_segments: the other rows.
        sampled_rows: `(num_sampled,)` int64, rows that yield a token, in the order of the scheduled requests.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    opened_block_ids: Tensor
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
    opened: list[int] = []
    sampled: list[int] = []
    segments: list[PrefillSegment] = []
    for index, rows in enumerate([*decodes, *prefills]):
        start, num_tokens = len(token_ids), len(rows.token_ids)
        at = np.arange(rows.num_computed_tokens, rows.num_computed_tokens + num_tokens)
        blocks = np.asarray(rows.block_ids, dtype=np.int64)
        token_ids.extend(rows.token_ids)
        positions.append(at)
        slots.append(blocks[at // block_size] * block_size + at % block_size)
        last, num_filled = divmod(rows.num_computed_tokens + num_tokens, block_size)
        if num_filled and last * block_size >= rows.num_computed_tokens:
            opened.append(rows.block_ids[last])
        if rows.samples:
            sampled.append(start + num_tokens - 1)
        if index >= len(decodes):
            segments.append(_segment(start, rows, blocks, block_size, device, dtype))
    return StepBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        slots=torch.from_numpy(np.concatenate(slots)).to(device),
        opened_block_ids=torch.tensor(opened, dtype=torch.int64, device=device),
        decode_groups=group_decodes(decodes, block_size, device),
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
