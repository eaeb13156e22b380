"""Attention over the paged KV: prompts one by one, decoding rows in padded groups."""

import torch
from torch import Tensor
from torch.nn import functional

from blend_core.engines.torch.batch import PrefillSegment
from blend_core.engines.torch.decode_groups import DecodeGroup
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

    Keys and values of the shared blocks are read once for all rows; one softmax goes over both parts.

    Args:
        query: `(num_rows, num_kv_heads, group, head_size)`, the group's rows.
        cache: KV of the layer.
        group: the rows' blocks and mask.
        space: where the contexts are gathered.

    Returns:
        `(num_rows, num_kv_heads, group, head_size)`.
    """
    num_rows, num_kv_heads, group_size, head_size = query.shape
    query = query.transpose(0, 1)
    keys, values = (
        space.gather(blocks, group.own_block_ids, index).view(num_kv_heads, num_rows, -1, head_size)
        for index, blocks in enumerate((cache.keys, cache.values))
    )
    scores = torch.matmul(query, keys.transpose(2, 3)).float()
    scores.mul_(head_size**-0.5).add_(group.mask)
    num_shared = len(group.shared_block_ids) * cache.keys.shape[2]
    if not num_shared:
        weights = torch.softmax(scores, dim=-1).to(query.dtype)
        return torch.matmul(weights, values).transpose(0, 1)
    shared_keys, shared_values = (
        space.gather(blocks, group.shared_block_ids, 2 + index)
        for index, blocks in enumerate((cache.keys, cache.values))
    )
    together = query.reshape(num_kv_heads, num_rows * group_size, head_size)
    shared_scores = torch.matmul(together, shared_keys.transpose(1, 2)).float().mul_(head_size**-0.5)
    shared_scores = shared_scores.view(num_kv_heads, num_rows, group_size, num_shared)
    weights = torch.softmax(torch.cat((shared_scores, scores), dim=-1), dim=-1).to(query.dtype)
    attended = torch.matmul(weights[..., num_shared:], values)
    shared_weights = weights[..., :num_shared].flatten(1, 2)
    attended += torch.matmul(shared_weights, shared_values).view_as(attended)
    return attended.transpose(0, 1)
