"""What a model costs and what a device can do: the two inputs of the performance model, and their files."""

import json
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from blend_core.errors import ConfigurationError

_MODEL_TYPES: Final = ("llama", "mistral", "qwen2", "qwen3")
_DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder-only transformer that the formulas need (ALGORITHM names in brackets).

    Attributes:
        name: the name under which it is recorded.
        num_parameters: all of them, as published: embedding table and output head included, once if tied [P].
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


_Spec = TypeVar("_Spec", ModelSpec, DeviceProfile)


def load_model_spec(folder: Path, dtype: str, name: str | None = None) -> ModelSpec:
    """Reads the sizes of a model from the `config.json` of its Hugging Face folder.

    Args:
        folder: folder with `config.json`.
        dtype: element type that it is served in: `bfloat16`, `float16`, `float32` or their short forms.
        name: the name to record; the folder's own by default.

    Raises:
        ConfigurationError: no readable configuration, or a model that the formulas do not cover.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} cannot be read as JSON ({type(error).__name__}); name a Hugging Face model folder."
        ) from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} holds no JSON object; name a Hugging Face folder.")
    return model_spec_from_hf_config(config, name or folder.resolve().name, dtype)


def model_spec_from_hf_config(config: Mapping[str, Any], name: str, dtype: str) -> ModelSpec:
    """Returns the spec of a dense decoder from its parsed Hugging Face configuration.

    Parameters are counted as published: the embedding table is in, once where it is tied to the output head.

    Raises:
        ConfigurationError: an architecture or a feature that the formulas do not cover, or a missing size.
    """
    dtype_bytes = _DTYPE_BYTES.get(dtype)
    if dtype_bytes is None:
        raise ConfigurationError(f"Unknown dtype {dtype!r}; use one of {', '.join(_DTYPE_BYTES)}.")
    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise ConfigurationError(
            f"Model {name} has the unsupported type {model_type!r}; use one of {', '.join(_MODEL_TYPES)}."
        )
    _refuse_uncovered_features(config, name)
    hidden = _size(config, name, "hidden_size")
    heads = _size(config, name, "num_attention_heads")
    kv_heads = _size(config, name, "num_key_value_heads", heads if model_type == "llama" else None)
    head_size = _size(config, name, "head_dim", 128 if model_type == "qwen3" else hidden // heads)
    layers = _size(config, name, "num_hidden_layers")
    intermediate = _size(config, name, "intermediate_size")
    vocab = _size(config, name, "vocab_size")

    attention_width, kv_width = heads * head_size, kv_heads * head_size
    per_layer = 2 * hidden * (attention_width + kv_width) + 3 * hidden * intermediate + 2 * hidden
    if model_type == "qwen2":
        per_layer += attention_width + 2 * kv_width
    elif config.get("attention_bias"):
        per_layer += attention_width + 2 * kv_width + hidden
    if config.get("mlp_bias"):
        per_layer += 2 * intermediate + hidden
    if model_type == "qwen3":
        per_layer += 2 * head_size
    tables = 1 if config.get("tie_word_embeddings", False) else 2
    return ModelSpec(
        name=name,
        num_parameters=tables * vocab * hidden + layers * per_layer + hidden,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        dtype_bytes=dtype_bytes,
        max_model_len=_size(config, name, "max_position_embeddings"),
        vocab_size=vocab,
    )


def model_spec_preset(name: str) -> ModelSpec:
    """Returns a shipped spec by name, for dry runs without the model's files.

    Raises:
        ConfigurationError: no preset has that name.
    """
    return _from_toml(ModelSpec, _shipped("models", name, "model preset"))


def model_spec_preset_names() -> tuple[str, ...]:
    """Returns the names of the shipped model specs, sorted."""
    return _shipped_names("models")


def load_device_profile(name_or_path: str) -> DeviceProfile:
    """Returns a shipped profile by name, or reads one from a path that ends in `.toml`.

    Raises:
        ConfigurationError: no profile has that name, or the file is not a valid profile.
    """
    if name_or_path.endswith(".toml"):
        return _from_toml(DeviceProfile, Path(name_or_path))
    return _from_toml(DeviceProfile, _shipped("devices", name_or_path, "device profile"))


def device_profile_names() -> tuple[str, ...]:
    """Returns the names of the shipped device profiles, sorted."""
    return _shipped_names("devices")


def save_device_profile(profile: DeviceProfile, path: Path) -> None:
    """Writes a profile as TOML that `load_device_profile` reads back exactly. Replaces the file."""
    lines = [f"{field.name} = {_toml_value(getattr(profile, field.name))}" for field in fields(profile)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _refuse_uncovered_features(config: Mapping[str, Any], name: str) -> None:
    if config.get("quantization_config"):
        raise ConfigurationError(
            f"Model {name} is quantised, which is not supported; use its 16 or 32 bit weights."
        )
    window = config.get("sliding_window")
    if (
        window
        and config.get("use_sliding_window", True)
        and window < config.get("max_position_embeddings", 0)
    ):
        raise ConfigurationError(
            f"Model {name} attends within a sliding window of {window} tokens, which is not supported; "
            "use a model with full attention."
        )


def _size(config: Mapping[str, Any], name: str, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(
            f"The configuration of model {name} lacks a positive {key}; use a complete folder."
        )
    return value


def _shipped_names(folder: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in Path(__file__).with_name(folder).glob("*.toml")))


def _shipped(folder: str, name: str, kind: str) -> Path:
    names = _shipped_names(folder)
    if name not in names:
        raise ConfigurationError(f"There is no {kind} {name!r}; use one of {', '.join(names)}.")
    return Path(__file__).with_name(folder) / f"{name}.toml"


def _from_toml(cls: type[_Spec], file: Path) -> _Spec:
    """Reads one value; every field must be there, of its type and in its range, and nothing else."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{file} cannot be read as TOML ({type(error).__name__}); check the path."
        ) from error
    values: dict[str, Any] = {}
    for field in fields(cls):
        value = table.pop(field.name, None)
        if field.type is float and type(value) is int:
            value = float(value)
        if type(value) is not field.type or not _is_valid(field.name, value):
            raise ConfigurationError(
                f"{file} lacks a valid {field.name}; see the shipped files for its form."
            )
        values[field.name] = value
    if table:
        raise ConfigurationError(f"{file} has unknown names: {', '.join(sorted(table))}; remove them.")
    return cls(**values)


def _is_valid(name: str, value: str | float) -> bool:
    if isinstance(value, str):
        return value != ""
    least_is_zero = name in ("gemm_fixed_s_per_layer", "overlap_interference")
    is_share = name in ("gemm_efficiency", "attention_bandwidth_efficiency", "overlap_interference")
    return (value > 0 or (least_is_zero and value == 0)) and value <= (1 if is_share else sys.float_info.max)


def _toml_value(value: str | float) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
