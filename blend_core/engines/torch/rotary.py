"""Rotary position embedding."""

import math

import torch
from torch import Tensor

from blend_core.engines.torch.model_config import RopeConfig


def rotary_frequencies(rope: RopeConfig, head_size: int) -> Tensor:
    """`(head_size / 2,)` float32 angles per position; Llama 3 stretches the long wavelengths by `factor`."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.llama3 is None:
        return frequencies
    factor, low_freq_factor, high_freq_factor, original_len = rope.llama3
    wavelengths = 2 * math.pi / frequencies
    smooth = (original_len / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    stretched = torch.where(wavelengths > original_len / low_freq_factor, frequencies / factor, blended)
    return torch.where(wavelengths < original_len / high_freq_factor, frequencies, stretched)


class RotaryTable:
    """Cosines and sines for every position."""

    __slots__ = ("_cos", "_sin")

    def __init__(
        self, rope: RopeConfig, head_size: int, max_model_len: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Computes in float32, keeps in the model's dtype, as the reference implementation does."""
        positions = torch.arange(max_model_len, dtype=torch.int64).float()
        angles = torch.outer(positions, rotary_frequencies(rope, head_size))
        angles = torch.cat((angles, angles), dim=-1)
        self._cos = angles.cos().to(device=device, dtype=dtype)
        # The first half's sine enters with a minus sign: with it here, rotating needs no negation.
        sign = torch.ones(head_size)
        sign[: head_size // 2] = -1
        self._sin = (angles.sin() * sign).to(device=device, dtype=dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, each `(num_tokens, 1, head_size)`."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `(num_tokens, num_heads, head_size)`; a new tensor."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return (heads * cos).addcmul_(swapped, sin)
