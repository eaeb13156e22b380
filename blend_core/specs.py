"""What a model costs and what a device can do: the two inputs of the performance model, and their files."""

import json
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from blend_core.errors import ConfigurationError
from blend_core.model_shape import ModelConfig, model_shape

_DTYPE_BYTES: Final = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
    # Names of torch's and vLLM's.
    "half": 2,
    "float": 4,
}

_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    # Wide enough for any device, and narrow enough that every duration is a number.
    "compute_flops_per_s": (1e6, 1e21),
    "bandwidth_bytes_per_s": (1e6, 1e18),
    "kv_capacity_bytes": (1e3, 1e18),
    "gemm_efficiency": (1e-6, 1.0),
    "gemm_fixed_s_per_layer": (0.0, 10.0),
    "attention_bandwidth_efficiency": (1e-6, 1.0),
    "overlap_interference": (0.0, 1.0),
}
"""Least and largest value of each number of a device profile."""

_MAX_NAME_LENGTH: Final = 100


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder-only transformer that the formulas need (their symbols in brackets).

    Attributes:
        name: the name under which it is recorded.
        num_parameters: all of them, as published: embedding table and output head included, once if tied [P].
            A step reads all of them, those of every expert too: a few dozen tokens find each expert in use.
        num_layers: transformer layers [L].
        hidden_size: width of the residual stream [H].
        num_heads: attention heads.
        num_kv_heads: key/value heads; equal to `num_heads` for MHA.
        head_size: elements of one head of queries and keys.
        dtype_bytes: bytes of one element of weights and KV [b].
        max_model_len: longest prompt plus answer, in tokens.
        vocab_size: rows of the output head.
        num_active_parameters: those that one token passes, of a mixture of experts; None where it is all.
        value_head_size: elements of one head of values; None where it is `head_size`.
        latent_kv_size: elements that a token holds in each layer under latent attention, shared by all heads;
            None where keys and values are kept for each head.
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
    num_active_parameters: int | None = None
    value_head_size: int | None = None
    latent_kv_size: int | None = None

    @property
    def parameters_per_token(self) -> int:
        """Parameters that one token is multiplied with: `P` of the compute formulas."""
        return self.num_parameters if self.num_active_parameters is None else self.num_active_parameters

    @property
    def attention_width(self) -> int:
        """`H` of the attention formulas: heads times the mean of what a head's two products are wide."""
        value_head_size = self.head_size if self.value_head_size is None else self.value_head_size
        return self.num_heads * (self.head_size + value_head_size) // 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV that one token holds: `2 H_kv L b` (BlendServe §4.1), or the latent ones."""
        elements = 2 * self.num_kv_heads * self.head_size
        if self.latent_kv_size is not None:
            elements = self.latent_kv_size
        return elements * self.num_layers * self.dtype_bytes


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

    def scaled(self, num_devices: int, efficiency: float = 1.0) -> "DeviceProfile":
        """Returns the profile of several devices that run one model by tensor parallelism. Does not mutate.

        Compute and bandwidth grow with the devices, less what `efficiency` leaves to communication; so does
        KV capacity. The fixed time of a layer stays: each device launches every layer. It holds while KV is
        split by head: a model with fewer KV heads than devices, or with latent KV, keeps copies instead, and
        its profile needs a smaller `kv_capacity_bytes`.

        Args:
            num_devices: devices of one replica.
            efficiency: share of their peaks that is left beside communication, above 0 and at most 1.

        Raises:
            ConfigurationError: either is out of its range.
        """
        if num_devices < 1 or not 0 < efficiency <= 1:
            raise ConfigurationError(
                "A profile is scaled to at least 1 device at an efficiency above 0 and at most 1; give those."
            )
        return replace(
            self,
            name=f"{self.name}-x{num_devices}",
            compute_flops_per_s=self.compute_flops_per_s * num_devices * efficiency,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * num_devices * efficiency,
            kv_capacity_bytes=self.kv_capacity_bytes * num_devices,
        )


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
    return model_spec_from_hf_config(read_hf_config(folder), name or folder.resolve().name, dtype)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Returns the parsed `config.json` of a Hugging Face folder.

    Raises:
        ConfigurationError: there is none, or it is no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} cannot be read as JSON ({type(error).__name__}); name a Hugging Face model folder."
        ) from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} holds no JSON object; name a Hugging Face folder.")
    return config


def model_spec_from_hf_config(config: Mapping[str, Any], name: str, dtype: str) -> ModelSpec:
    """Returns the spec of a decoder from its parsed Hugging Face configuration.

    Dense models, mixtures of experts, and latent attention (MLA). Parameters are counted as published: the
    embedding table is in, once where it is tied to the output head.

    Raises:
        ConfigurationError: an architecture or a feature that the formulas do not cover, or a missing size.
    """
    dtype_bytes = _DTYPE_BYTES.get(dtype)
    if dtype_bytes is None:
        raise ConfigurationError(f"Unknown dtype {dtype!r}; use one of {', '.join(_DTYPE_BYTES)}.")
    shape = model_shape(ModelConfig(config, name))
    return ModelSpec(name=name, dtype_bytes=dtype_bytes, **asdict(shape))


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
    """Writes a profile as TOML that `load_device_profile` reads back exactly. Replaces the file.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    lines = [f"{field.name} = {_toml_value(getattr(profile, field.name))}" for field in fields(profile)]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"The profile cannot be written to {path} ({error.strerror}); name a file in a folder of yours."
        ) from None


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
    except OSError as error:
        raise ConfigurationError(
            f"{file} cannot be read ({error.strerror}); name a TOML file that is there."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{file} is not TOML ({type(error).__name__}); see the shipped files for its form."
        ) from error
    values: dict[str, Any] = {}
    for field in fields(cls):
        value = table.pop(field.name, None)
        if value is None and field.default is None:
            continue
        if value is None:
            raise ConfigurationError(f"{file} lacks {field.name}; see the shipped files for its form.")
        values[field.name] = _checked(file, field.name, value, int if field.default is None else field.type)
    if table:
        raise ConfigurationError(f"{file} has unknown names: {', '.join(sorted(table))}; remove them.")
    return cls(**values)


def _checked(file: Path, name: str, value: object, expected: Any) -> str | float:
    if expected is str:
        if isinstance(value, str) and is_profile_name(value):
            return value
        allowed = f"one line of 1 to {_MAX_NAME_LENGTH} characters"
    else:
        least, most = _RANGES.get(name, (1, 1 << 62))
        # Not a number is in no range.
        if isinstance(value, int | float) and type(value) in (int, expected) and least <= value <= most:
            return float(value) if expected is float else value
        allowed = f"{'a' if expected is float else 'a whole'} number from {least:g} to {most:g}"
    raise ConfigurationError(f"{file} has {reprlib.repr(value)} as {name}; make it {allowed}.")


def is_profile_name(name: str) -> bool:
    """Whether a profile may have that name: it goes into tables, reports and the database."""
    return 0 < len(name) <= _MAX_NAME_LENGTH and name.isprintable()


def _toml_value(value: str | float) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
