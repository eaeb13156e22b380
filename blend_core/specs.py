"""What a model costs and what a device can do: the two inputs of the performance model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder-only transformer that the formulas need (ALGORITHM names in brackets).

    Attributes:
        name: the name under which it is recorded.
        num_parameters: parameters that one token passes through, the output head included [P].
        num_layers: transformer layers [L].
        hidden_size: width of the residual stream [H].
        num_heads: attention heads.
        num_kv_heads: key/value heads; equal to `num_heads` for MHA.
        head_size: elements of one head.
        dtype_bytes: bytes of one element of weights and KV [b].
        max_model_len: longest prompt plus answer, in tokens.
        vocab_size: rows of the output head.
    """

    name: str
    num_parameters: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    max_model_len: int
    vocab_size: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token holds: `2 H_kv L b` (BlendServe §4.1)."""
        return 2 * self.num_kv_heads * self.head_size * self.num_layers * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Measured or published abilities of one device.

    Attributes:
        name: the name under which it is recorded.
        compute_flops_per_s: peak of dense matrix products in the serving dtype.
        bandwidth_bytes_per_s: peak of device memory.
        kv_capacity_bytes: memory left for KV beside weights and activations.
        gemm_efficiency: share of `compute_flops_per_s` that large GEMMs reach.
        gemm_fixed_s_per_layer: seconds a layer costs per step whatever its tokens (the affine part).
        attention_bandwidth_efficiency: share of `bandwidth_bytes_per_s` that decode attention reaches.
        overlap_interference: share of the shorter of compute and memory time that overlap cannot hide.
    """

    name: str
    compute_flops_per_s: float
    bandwidth_bytes_per_s: float
    kv_capacity_bytes: float
    gemm_efficiency: float
    gemm_fixed_s_per_layer: float
    attention_bandwidth_efficiency: float
    overlap_interference: float
