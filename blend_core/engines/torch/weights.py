"""From safetensors to the fused matrices that the operators multiply with."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from blend_core.engines.torch.linear import Linear, PackedLinear, PlainLinear, can_pack
from blend_core.engines.torch.model_config import ModelConfig
from blend_core.errors import ConfigurationError
from blend_core.model_store import WEIGHT_FILES


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. q, k and v are one matrix, as are gate and up.

    Attributes:
        attention_norm: `(hidden,)`.
        qkv: hidden to `(num_heads + 2 num_kv_heads) * head_size`.
        q_norm: `(head_size,)` or None.
        k_norm: `(head_size,)` or None.
        output: `num_heads * head_size` to hidden.
        mlp_norm: `(hidden,)`.
        gate_up: hidden to `2 * intermediate`.
        down: intermediate to hidden.
    """

    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Every weight on its device.

    Attributes:
        embedding: `(vocab, hidden)`.
        layers: from the first to the last.
        final_norm: `(hidden,)`.
        head: hidden to vocab.
        packed: whether the matrices are in the CPU's blocked layout.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear
    packed: bool


def load_weights(folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """Loads the folder's safetensors onto the device.

    Raises:
        ConfigurationError: no safetensors, a file is damaged, or a tensor is missing or of the wrong shape.
    """
    reader = _TensorReader(folder, device, dtype)
    packed = can_pack(device, dtype)
    linear_type = PackedLinear if packed else PlainLinear

    def fused(names: Iterable[str], rows: Iterable[int], columns: int, biased: bool) -> Linear:
        sizes = list(zip(names, rows, strict=True))
        weight = torch.cat([reader.get(f"{name}.weight", (size, columns)) for name, size in sizes])
        bias = torch.cat([reader.get(f"{name}.bias", (size,)) for name, size in sizes]) if biased else None
        return linear_type(weight, bias)

    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        head_norms = [
            reader.get(f"{attention}.{name}_norm.weight", (config.head_size,)) if config.qk_norm else None
            for name in ("q", "k")
        ]
        layers.append(
            LayerWeights(
                attention_norm=reader.get(f"{prefix}.input_layernorm.weight", (hidden,)),
                qkv=fused(
                    [f"{attention}.{name}_proj" for name in "qkv"],
                    [q_size, kv_size, kv_size],
                    hidden,
                    config.qkv_bias,
                ),
                q_norm=head_norms[0],
                k_norm=head_norms[1],
                output=fused([f"{attention}.o_proj"], [hidden], q_size, config.output_bias),
                mlp_norm=reader.get(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
                gate_up=fused(
                    [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], hidden, config.mlp_bias
                ),
                down=fused([f"{mlp}.down_proj"], [hidden], inner, config.mlp_bias),
            )
        )
    embedding = reader.get("model.embed_tokens.weight", (config.vocab_size, hidden))
    if config.tie_word_embeddings:
        head_weight = embedding
    else:
        head_weight = reader.get("lm_head.weight", (config.vocab_size, hidden))
    return ModelWeights(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=reader.get("model.norm.weight", (hidden,)),
        head=linear_type(head_weight, None),
        packed=packed,
    )


class _TensorReader:
    """Tensors by name out of all safetensors files of a folder."""

    __slots__ = ("_device", "_dtype", "_file_of_tensor", "_folder")

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self._folder = folder
        self._device = device
        self._dtype = dtype
        self._file_of_tensor: dict[str, Any] = {}
        paths = sorted(folder.glob(WEIGHT_FILES))
        if not paths:
            raise ConfigurationError(
                f"{folder} holds no safetensors file; give the folder of a Hugging Face model."
            )
        for path in paths:
            try:
                file: Any = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ConfigurationError(f"{path} cannot be read ({error}); fetch the model again.") from None
            self._file_of_tensor.update(dict.fromkeys(file.keys(), file))

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        file = self._file_of_tensor.get(name)
        if file is None:
            raise ConfigurationError(f"The safetensors in {self._folder} lack {name}; fetch the model again.")
        tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigurationError(
                f"{name} in {self._folder} has shape {tuple(tensor.shape)}, its config.json asks for "
                f"{shape}; fetch the model again."
            )
        return tensor.to(device=self._device, dtype=self._dtype)
