"""What `config.json` says about a model, checked against what this engine computes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blend_core.errors import ConfigurationError

# Architectures and what sets each apart from plain Llama: (biased q, k, v; normalised q, k heads).
_ARCHITECTURES = {
    "LlamaForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (False, True),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: plain, or with Llama 3's stretched low frequencies.

    Attributes:
        theta: base of the frequencies.
        llama3: None for plain; else (factor, low_freq_factor, high_freq_factor,
            original_max_position_embeddings).
    """

    theta: float
    llama3: tuple[float, float, float, int] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one Llama-like decoder.

    Attributes:
        architecture: Hugging Face class name.
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_layers: layers.
        num_heads: attention heads.
        num_kv_heads: key/value heads.
        head_size: elements of a head.
        rms_norm_eps: epsilon of every norm.
        rope: rotary embedding.
        qkv_bias: q, k and v have a bias.
        output_bias: the attention's output projection has a bias.
        mlp_bias: the MLP's projections have a bias.
        qk_norm: q and k heads are normalised before rotation.
        tie_word_embeddings: the output head is the embedding.
        max_model_len: positions that the model was made for.
        eos_token_ids: tokens that end an answer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_model_len: int
    eos_token_ids: frozenset[int]


def load_model_config(folder: Path) -> ModelConfig:
    """Reads and checks `config.json` (and `generation_config.json` for the end-of-sequence tokens).

    Raises:
        ConfigurationError: the file is missing or unreadable, or the model needs what this engine does not
            compute; the message names it.
    """
    raw = _read_json(folder / "config.json")
    if raw is None:
        raise ConfigurationError(f"{folder} holds no config.json; give the folder of a Hugging Face model.")
    name = _architecture(raw)
    always_biased, qk_norm = _ARCHITECTURES[name]
    _refuse_unsupported(raw)
    biased = always_biased or bool(raw.get("attention_bias", False))
    try:
        num_heads = int(raw["num_attention_heads"])
        hidden_size = int(raw["hidden_size"])
        return ModelConfig(
            architecture=name,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
            head_size=int(raw.get("head_dim") or hidden_size // num_heads),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_rope(raw),
            qkv_bias=biased,
            output_bias=biased and not always_biased,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=qk_norm,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            max_model_len=int(raw.get("max_position_embeddings", 2048)),
            eos_token_ids=_eos_token_ids(raw, _read_json(folder / "generation_config.json") or {}),
        )
    except KeyError as error:
        raise ConfigurationError(f"config.json in {folder} has no {error.args[0]}; complete it.") from None
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"config.json in {folder} holds a value of the wrong kind ({error}); fetch the model again."
        ) from None


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON ({error}); fetch the model again.") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} holds no JSON object; fetch the model again.")
    return value


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or ["(none named)"]
    for name in names:
        if name in _ARCHITECTURES:
            return str(name)
    raise ConfigurationError(
        f"Architecture {names[0]} is not supported by the torch engine; it runs {', '.join(_ARCHITECTURES)}."
    )


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise ConfigurationError(
            f"The model is quantised ({method}); the torch engine runs bfloat16 and float32 weights, so give "
            "the model's unquantised folder."
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigurationError(
            f"Activation {raw['hidden_act']!r} is not supported by the torch engine; only silu is."
        )
    layer_types = set(raw.get("layer_types") or ["full_attention"])
    if raw.get("use_sliding_window") or layer_types != {"full_attention"}:
        raise ConfigurationError("Sliding-window attention is not supported by the torch engine.")


def _rope(raw: dict[str, Any]) -> RopeConfig:
    """Reads both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling`."""
    parameters = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if float(parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigurationError("Partial rotary embedding is not supported by the torch engine.")
    if kind == "default":
        return RopeConfig(theta)
    if kind != "llama3":
        raise ConfigurationError(
            f"Rope scaling {kind!r} is not supported by the torch engine; it runs 'default' and 'llama3'."
        )
    try:
        return RopeConfig(
            theta,
            (
                float(parameters["factor"]),
                float(parameters["low_freq_factor"]),
                float(parameters["high_freq_factor"]),
                int(parameters["original_max_position_embeddings"]),
            ),
        )
    except KeyError as error:
        raise ConfigurationError(
            f"Rope scaling 'llama3' lacks {error.args[0]} in config.json; complete it."
        ) from None


def _eos_token_ids(*sources: dict[str, Any]) -> frozenset[int]:
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
