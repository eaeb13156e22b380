"""The forward pass as a list of operators, decode attention apart.

An operator reads and writes the `StepState` of the rows it is run on, and says on which lane it belongs: the
compute lane (matrix products, prefill attention) or the memory lane (decode attention). Operators of one
state run in list order; an executor may run those of two states beside one another.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from blend_core.engines.torch.attention import decode_attention, prefill_attention
from blend_core.engines.torch.batch import StepBatch
from blend_core.engines.torch.kv_cache import GatherSpace, LayerCache
from blend_core.engines.torch.model_config import ModelConfig
from blend_core.engines.torch.rotary import RotaryTable, rotate
from blend_core.engines.torch.weights import LayerWeights, ModelWeights


class Lane(StrEnum):
    """What an operator is bound by."""

    COMPUTE = "compute"
    MEMORY = "memory"


class StepState:
    """What flows through the operators for the rows of one batch.

    Attributes:
        batch: the rows.
        hidden: `(num_tokens, hidden)`, the residual stream.
        query: `(num_tokens, num_kv_heads, group, head_size)` after a layer's `QkvProjection`.
        attended: `(num_tokens, num_kv_heads, group, head_size)` after a layer's attention.
        cos: cosines of the rows' positions.
        sin: signed sines of the rows' positions.
        logits: `(num_sampled, vocab)` float32 after the last operator.
    """

    __slots__ = ("attended", "batch", "cos", "hidden", "logits", "query", "sin")

    hidden: Tensor
    query: Tensor
    attended: Tensor
    cos: Tensor
    sin: Tensor
    logits: Tensor

    def __init__(self, batch: StepBatch) -> None:
        self.batch = batch


class Operator(Protocol):
    """One piece of the forward pass."""

    @property
    def lane(self) -> Lane:
        """Where it belongs."""

    def run(self, state: StepState) -> None:
        """Mutates the state and, for projections of keys and values, the cache."""


class Embedding:
    """Looks tokens and positions up."""

    lane = Lane.COMPUTE

    def __init__(self, weights: ModelWeights, rotary: RotaryTable) -> None:
        self._embedding = weights.embedding
        self._rotary = rotary

    def run(self, state: StepState) -> None:
        """Sets `hidden`, `cos` and `sin`."""
        state.hidden = functional.embedding(state.batch.token_ids, self._embedding)
        state.cos, state.sin = self._rotary.at(state.batch.positions)


class QkvProjection:
    """Norm, fused q/k/v product, rotation; writes keys and values into the cache."""

    lane = Lane.COMPUTE

    def __init__(self, weights: LayerWeights, config: ModelConfig, cache: LayerCache) -> None:
        self._weights = weights
        self._config = config
        self._cache = cache

    def run(self, state: StepState) -> None:
        """Sets `query`."""
        config, weights = self._config, self._weights
        normed = _rms_norm(state.hidden, weights.attention_norm, config.rms_norm_eps)
        num_rotated = config.num_heads + config.num_kv_heads
        heads = weights.qkv(normed).view(len(normed), num_rotated + config.num_kv_heads, config.head_size)
        rotated, values = heads[:, :num_rotated], heads[:, num_rotated:]
        if weights.q_norm is not None and weights.k_norm is not None:
            query, keys = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
            rotated = torch.cat(
                (
                    _rms_norm(query, weights.q_norm, config.rms_norm_eps),
                    _rms_norm(keys, weights.k_norm, config.rms_norm_eps),
                ),
                dim=1,
            )
        rotated = rotate(rotated, state.cos, state.sin)
        self._cache.open(state.batch.opened_block_ids)
        self._cache.write(state.batch.slots, rotated[:, config.num_heads :], values)
        query = rotated[:, : config.num_heads]
        state.query = query.view(len(normed), config.num_kv_heads, -1, config.head_size)


class PrefillAttention:
    """Prompt rows attend to their context."""

    lane = Lane.COMPUTE

    def __init__(self, cache: LayerCache, space: GatherSpace) -> None:
        self._cache = cache
        self._space = space

    def run(self, state: StepState) -> None:
        """Sets the prompt rows of `attended`, which it makes."""
        state.attended = torch.empty_like(state.query, memory_format=torch.contiguous_format)
        for segment in state.batch.prefill_segments:
            rows = slice(segment.start, segment.start + segment.num_tokens)
            state.attended[rows] = prefill_attention(state.query[rows], self._cache, segment, self._space)


class DecodeAttention:
    """Decoding rows attend to their contexts."""

    lane = Lane.MEMORY

    def __init__(self, cache: LayerCache, space: GatherSpace) -> None:
        self._cache = cache
        self._space = space

    def run(self, state: StepState) -> None:
        """Sets the decoding rows of `attended`."""
        for group in state.batch.decode_groups:
            state.attended[group.rows] = decode_attention(
                state.query[group.rows], self._cache, group, self._space
            )


class OutputProjection:
    """The attention's output product, added to the residual stream."""

    lane = Lane.COMPUTE

    def __init__(self, weights: LayerWeights) -> None:
        self._weights = weights

    def run(self, state: StepState) -> None:
        """Adds to `hidden`."""
        state.hidden = state.hidden + self._weights.output(state.attended.flatten(1))


class Mlp:
    """Norm, fused gate/up product, SiLU, down product, added to the residual stream."""

    lane = Lane.COMPUTE

    def __init__(self, weights: LayerWeights, config: ModelConfig) -> None:
        self._weights = weights
        self._eps = config.rms_norm_eps

    def run(self, state: StepState) -> None:
        """Adds to `hidden`."""
        normed = _rms_norm(state.hidden, self._weights.mlp_norm, self._eps)
        gate, up = self._weights.gate_up(normed).chunk(2, dim=-1)
        state.hidden = state.hidden + self._weights.down(functional.silu(gate).mul_(up))


class Head:
    """Final norm and output head, for the rows that sample only."""

    lane = Lane.COMPUTE

    def __init__(self, weights: ModelWeights, config: ModelConfig) -> None:
        self._weights = weights
        self._eps = config.rms_norm_eps

    def run(self, state: StepState) -> None:
        """Sets `logits`."""
        sampled = state.hidden[state.batch.sampled_rows]
        state.logits = self._weights.head(_rms_norm(sampled, self._weights.final_norm, self._eps)).float()


def build_operators(
    weights: ModelWeights, config: ModelConfig, rotary: RotaryTable, caches: Sequence[LayerCache]
) -> list[Operator]:
    """The whole forward pass, in order: embedding, five operators a layer, head."""
    space = GatherSpace()
    operators: list[Operator] = [Embedding(weights, rotary)]
    for layer, cache in zip(weights.layers, caches, strict=True):
        operators += [
            QkvProjection(layer, config, cache),
            PrefillAttention(cache, space),
            DecodeAttention(cache, space),
            OutputProjection(layer),
            Mlp(layer, config),
        ]
    return [*operators, Head(weights, config)]


def _rms_norm(rows: Tensor, gains: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(rows, gains.shape, gains, eps)
