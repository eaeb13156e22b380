"""Matrix products with fixed weights, in the layout that the device multiplies fastest."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Linear(Protocol):
    """`y = x W^T + b` over rows."""

    def __call__(self, rows: Tensor) -> Tensor:
        """`(num_rows, in)` to `(num_rows, out)`; a new tensor."""


class PlainLinear:
    """Weights as they were loaded: every device has this one."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keeps `weight` `(out, in)` and `bias` `(out,)`."""
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Linear`."""
        return functional.linear(rows, self._weight, self._bias)


class PackedLinear:
    """Weights in oneDNN's blocked layout: at 32 rows two to four times as fast as plain ones on x86 CPUs.

    Built on operators that torch keeps for its own compiler: `can_pack` tries them before they are trusted.
    """

    __slots__ = ("_bias", "_weight")

    _ROWS_HINT = 32

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Packs `weight` `(out, in)`; the original may be freed."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self._ROWS_HINT)
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Linear`."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return product


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed products exist here and give what plain ones give."""
    if device.type != "cpu":
        return False
    weight = torch.linspace(-1, 1, 64 * 32).view(64, 32).to(dtype)
    rows = torch.linspace(-1, 1, 5 * 32).view(5, 32).to(dtype)
    try:
        packed = PackedLinear(weight, None)(rows)
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(packed.float(), PlainLinear(weight, None)(rows).float(), rtol=2e-2, atol=2e-2)


def native_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it natively, else float32."""
    if device.type == "cpu":
        probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        native = any(getattr(torch.cpu, probe, bool)() for probe in probes)
        return torch.bfloat16 if native else torch.float32
    return torch.bfloat16
