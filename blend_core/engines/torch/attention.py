"""Attention over the paged KV: prompts one by one, decoding rows in padded groups."""

import torch
from torch import Tensor
from torch.nn import functional

from blend_core.engines.torch.batch import DecodeGroup, PrefillSegment
from blend_core.engines.torch.kv_cache import GatherSpace, LayerCache


def prefill_attention(
    query: Tensor, cache: LayerCache, segment: PrefillSegment, space: GatherSpace
) -> Tensor:
    """Attends the rows of one prompt to its context, which has been written already.

    Args:
        query: `(num_tokens, num_kv_heads, group, head_size)`, the segment's rows.
        cache: KV of the layer.
        segment: the rows' blocks and mask.
        space: where the context is gathered.

    Returns:
        `(num_tokens, num_kv_heads, group, head_size)`.
    """
    group = query.shape[2]
    keys, values = (
        space.gather(blocks, segment.block_ids, index)[:, None, : segment.num_context_tokens].expand(
            -1, group, -1, -1
        )
        for index, blocks in enumerate((cache.keys, cache.values))
    )
    # Key/value heads take the place of the batch, so that a group shares its keys without a copy.
    attended = functional.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3), keys, values, attn_mask=segment.mask, is_causal=segment.mask is None
    )
    return attended.permute(2, 0, 1, 3)


def decode_attention(query: Tensor, cache: LayerCache, group: DecodeGroup, space: GatherSpace) -> Tensor:
    """Attends each row of a group to its own context, its own token included.

    Args:
        query: `(num_rows, num_kv_heads, group, head_size)`, the group's rows.
        cache: KV of the layer.
        group: the rows' blocks and mask.
        space: where the contexts are gathered.

    Returns:
        `(num_rows, num_kv_heads, group, head_size)`.
    """
    num_rows, num_kv_heads, _, head_size = query.shape
    keys, values = (
        space.gather(blocks, group.block_ids, index).view(num_kv_heads, num_rows, -1, head_size)
        for index, blocks in enumerate((cache.keys, cache.values))
    )
    scores = torch.matmul(query.transpose(0, 1), keys.transpose(2, 3)).float()
    scores.mul_(head_size**-0.5).add_(group.mask)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    return torch.matmul(weights, values).transpose(0, 1)
