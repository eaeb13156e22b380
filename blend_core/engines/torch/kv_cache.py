"""The KV blocks themselves, per layer."""

import torch
from torch import Tensor

from blend_core.engines.torch.model_config import ModelConfig


class LayerCache:
    """Keys and values of one layer, head-major: a gathered context feeds a batched product as it lies."""

    __slots__ = ("keys", "values")

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> None:
        """Zeroed: what is masked is read all the same, and must be finite to vanish.

        Args:
            shape: `(num_kv_heads, num_blocks, block_size, head_size)`.
            device: where.
            dtype: of the elements.
        """
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)

    def open(self, block_ids: Tensor) -> None:
        """Zeroes blocks that come to another request. Mutates the cache.

        The unwritten rest of a block is read under a mask, which nothing that is no number vanishes under.
        """
        if len(block_ids):
            self.keys.index_fill_(1, block_ids, 0)
            self.values.index_fill_(1, block_ids, 0)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores `(num_tokens, num_kv_heads, head_size)` at `slots`. Mutates the cache."""
        for cache, rows in ((self.keys, keys), (self.values, values)):
            cache.flatten(1, 2).index_copy_(1, slots, rows.transpose(0, 1))


class GatherSpace:
    """Memory that gathered blocks are copied into, kept between steps: fresh pages cost more than the copy.

    What `gather` returns is valid until the next call with the same `index`.
    """

    __slots__ = ("_buffers",)

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}

    def gather(self, cache: Tensor, block_ids: Tensor, index: int) -> Tensor:
        """Copies blocks to `(num_kv_heads, num_blocks * block_size, head_size)`."""
        num_heads, _, block_size, head_size = cache.shape
        width = block_size * head_size
        size = num_heads * len(block_ids) * width
        buffer = self._buffers.get(index)
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(size + size // 4, device=cache.device, dtype=cache.dtype)
            self._buffers[index] = buffer
        gathered = buffer[:size].view(num_heads, len(block_ids), width)
        torch.index_select(cache.flatten(2, 3), 1, block_ids, out=gathered)
        return gathered.view(num_heads, -1, head_size)


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block over all layers."""
    elements = 2 * config.num_layers * config.num_kv_heads * config.head_size * block_size
    return elements * dtype.itemsize
