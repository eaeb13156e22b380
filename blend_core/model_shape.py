"""Sizes and parameter counts of a decoder, from its Hugging Face configuration."""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from blend_core.errors import ConfigurationError
from blend_core.wording import count_text

MAX_SIZE: Final = 1 << 30
"""Largest size that a configuration may state."""

MAX_NUM_LAYERS: Final = 10_000

_QWEN3_HEAD_SIZE: Final = 128


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a configuration says of a model whatever its element type; attributes as of `ModelSpec`."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    vocab_size: int
    num_active_parameters: int | None
    value_head_size: int | None
    latent_kv_size: int | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A parsed `config.json` with the name to use in errors."""

    values: Mapping[str, Any]
    name: str

    @property
    def model_type(self) -> str:
        """`model_type`, empty where there is none."""
        return str(self.values.get("model_type"))

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """Returns a whole number from 1 to `most`; null counts as missing.

        Raises:
            ConfigurationError: it is missing without a default, or no such number.
        """
        return self._whole(key, default, 1, most)

    def num_layers(self) -> int:
        """Returns the number of layers.

        Raises:
            ConfigurationError: it is missing, or no number of layers.
        """
        return self.size("num_hidden_layers", most=MAX_NUM_LAYERS)

    def count(self, key: str) -> int:
        """Returns a whole number that may be 0, and is where it is missing or null.

        Raises:
            ConfigurationError: it is something else.
        """
        return self._whole(key, 0, 0, MAX_SIZE)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Returns true or false; null counts as missing.

        Raises:
            ConfigurationError: it is something else.
        """
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._error(key, value, "true or false")
        return value

    def layers(self, key: str) -> tuple[int, ...]:
        """Returns a list of layer numbers, empty where it is missing or null.

        Raises:
            ConfigurationError: it is something else.
        """
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(_is_whole(layer) for layer in value):
            raise self._error(key, value, "a list of whole numbers")
        return tuple(value)

    def _whole(self, key: str, default: int | None, least: int, most: int) -> int:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ConfigurationError(
                    f"The configuration of model {self.name} lacks {key}; use a complete folder."
                )
            value = default
        if not _is_whole(value) or not least <= value <= most:
            raise self._error(key, value, f"a whole number from {least} to {most:,}")
        return int(value)

    def _error(self, key: str, value: object, expected: str) -> ConfigurationError:
        return ConfigurationError(
            f"The configuration of model {self.name} has {reprlib.repr(value)} as {key}; make it {expected}."
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class _Attention:
    """One layer's attention: its parameters and sizes."""

    num_parameters: int
    num_kv_heads: int
    head_size: int
    value_head_size: int | None = None
    latent_kv_size: int | None = None


@dataclass(frozen=True, slots=True)
class _FeedForward:
    """The feed-forward parts of all layers: their parameters, and those that one token passes."""

    num_parameters: int
    num_active_parameters: int


def model_shape(config: ModelConfig) -> ModelShape:
    """Returns the shape of a covered model.

    Raises:
        ConfigurationError: an architecture or a feature that the formulas do not cover, or a missing size.
    """
    if config.model_type not in _PARTS:
        raise ConfigurationError(
            f"Model {config.name} has the unsupported type {config.model_type!r}; "
            f"use one of {', '.join(_PARTS)}."
        )
    _refuse_uncovered_features(config)
    attention_of, feed_forward_of = _PARTS[config.model_type]
    attention, feed_forward = attention_of(config), feed_forward_of(config)
    hidden, layers = config.size("hidden_size"), config.num_layers()
    vocab = config.size("vocab_size")
    tables = 1 if config.flag("tie_word_embeddings") else 2
    # Beside the parts, two norms to a layer and one behind the last.
    num_parameters = (
        tables * vocab * hidden
        + layers * (attention.num_parameters + 2 * hidden)
        + feed_forward.num_parameters
        + hidden
    )
    num_idle = feed_forward.num_parameters - feed_forward.num_active_parameters
    return ModelShape(
        num_parameters=num_parameters,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=config.size("num_attention_heads"),
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        max_model_len=config.size("max_position_embeddings"),
        vocab_size=vocab,
        num_active_parameters=num_parameters - num_idle if num_idle else None,
        value_head_size=attention.value_head_size,
        latent_kv_size=attention.latent_kv_size,
    )


def _refuse_uncovered_features(config: ModelConfig) -> None:
    values, name = config.values, config.name
    if values.get("quantization_config"):
        raise ConfigurationError(
            f"Model {name} is quantised, which is not supported; use its 16 or 32 bit weights."
        )
    window = 0
    if config.flag("use_sliding_window", default=True) and values.get("sliding_window") is not False:
        window = config.count("sliding_window")
    if 0 < window < config.size("max_position_embeddings"):
        raise ConfigurationError(
            f"Model {name} attends within a sliding window of {count_text(window, 'token')}, which is not "
            "supported; use a model with full attention."
        )
    if config.model_type.startswith("deepseek") and config.flag("attention_bias"):
        raise ConfigurationError(
            f"Model {name} has biases in its latent attention, which is not supported; use one without."
        )


def _headed_attention(config: ModelConfig) -> _Attention:
    """Keys and values for each head, or for a group of heads (MHA, GQA)."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    model_type = config.model_type
    kv_heads = config.size("num_key_value_heads", heads if model_type == "llama" else None)
    if heads % kv_heads:
        raise ConfigurationError(
            f"Model {config.name} has {heads} attention heads for {kv_heads} of keys and values, which is no "
            "whole number for each; correct its config.json."
        )
    head_size = config.size("head_dim", _QWEN3_HEAD_SIZE if model_type == "qwen3" else hidden // heads)
    width, kv_width = heads * head_size, kv_heads * head_size
    num_parameters = 2 * hidden * (width + kv_width)
    if model_type.startswith("qwen2"):
        num_parameters += width + 2 * kv_width
    elif config.flag("attention_bias"):
        num_parameters += width + 2 * kv_width + hidden
    if model_type.startswith("qwen3"):
        num_parameters += 2 * head_size
    return _Attention(num_parameters, kv_heads, head_size)


def _latent_attention(config: ModelConfig) -> _Attention:
    """Keys and values unfolded from one latent vector of a token, beside a rotary key for all heads (MLA)."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    latent, rotary = config.size("kv_lora_rank"), config.size("qk_rope_head_dim")
    plain, value = config.size("qk_nope_head_dim"), config.size("v_head_dim")
    query_width = heads * (plain + rotary)
    if config.values.get("q_lora_rank") is None:
        query = hidden * query_width
    else:
        rank = config.size("q_lora_rank")
        query = hidden * rank + rank + rank * query_width
    num_parameters = (
        query
        + hidden * (latent + rotary)
        + latent
        + latent * heads * (plain + value)
        + heads * value * hidden
    )
    return _Attention(num_parameters, heads, plain + rotary, value, latent + rotary)


def _dense(config: ModelConfig) -> _FeedForward:
    hidden, intermediate = config.size("hidden_size"), config.size("intermediate_size")
    each = 3 * hidden * intermediate
    if config.flag("mlp_bias"):
        each += 2 * intermediate + hidden
    return _every_token(config.num_layers() * each)


def _mixtral(config: ModelConfig) -> _FeedForward:
    hidden = config.size("hidden_size")
    expert = 3 * hidden * config.size("intermediate_size")
    experts, per_token = config.size("num_local_experts"), config.size("num_experts_per_tok")
    router = hidden * experts
    return _layers_of_experts(config.num_layers(), router, expert, experts, per_token, config.name)


def _qwen_moe(config: ModelConfig) -> _FeedForward:
    """Experts in every `decoder_sparse_step`-th layer but `mlp_only_layers`; one may be for all tokens."""
    hidden, layers = config.size("hidden_size"), config.num_layers()
    experts, per_token = config.size("num_experts"), config.size("num_experts_per_tok")
    step, dense_ones = config.size("decoder_sparse_step", 1), config.layers("mlp_only_layers")
    num_sparse = sum((layer + 1) % step == 0 and layer not in dense_ones for layer in range(layers))
    expert = 3 * hidden * config.size("moe_intermediate_size")
    always = hidden * experts
    if config.model_type == "qwen2_moe":
        always += 3 * hidden * config.size("shared_expert_intermediate_size") + hidden
    dense = 0
    if num_sparse < layers:
        dense = (layers - num_sparse) * 3 * hidden * config.size("intermediate_size")
    return _joined(
        _layers_of_experts(num_sparse, always, expert, experts, per_token, config.name), _every_token(dense)
    )


def _deepseek_moe(config: ModelConfig) -> _FeedForward:
    """Dense layers first, then experts in every `moe_layer_freq`-th layer, some of them for all tokens."""
    hidden, layers = config.size("hidden_size"), config.num_layers()
    first, step = config.count("first_k_dense_replace"), config.size("moe_layer_freq", 1)
    num_sparse = sum(layer >= first and layer % step == 0 for layer in range(layers))
    experts, per_token = config.size("n_routed_experts"), config.size("num_experts_per_tok")
    expert = 3 * hidden * config.size("moe_intermediate_size")
    shared = config.count("n_shared_experts")
    always = hidden * experts + shared * expert
    if config.model_type == "deepseek_v3":
        # A correction to the router's score of each expert.
        always += experts
    dense = 0
    if num_sparse < layers:
        dense = (layers - num_sparse) * 3 * hidden * config.size("intermediate_size")
    return _joined(
        _layers_of_experts(num_sparse, always, expert, experts, per_token, config.name), _every_token(dense)
    )


def _every_token(num_parameters: int) -> _FeedForward:
    return _FeedForward(num_parameters, num_parameters)


def _layers_of_experts(
    num_layers: int, always: int, expert: int, num_experts: int, num_per_token: int, name: str
) -> _FeedForward:
    if num_per_token > num_experts:
        raise ConfigurationError(
            f"Model {name} sends a token to {num_per_token} of {num_experts} experts; use a sound folder."
        )
    return _FeedForward(
        num_layers * (always + num_experts * expert), num_layers * (always + num_per_token * expert)
    )


def _joined(one: _FeedForward, other: _FeedForward) -> _FeedForward:
    return _FeedForward(
        one.num_parameters + other.num_parameters, one.num_active_parameters + other.num_active_parameters
    )


_PARTS: Final[
    Mapping[str, tuple[Callable[[ModelConfig], _Attention], Callable[[ModelConfig], _FeedForward]]]
] = {
    "llama": (_headed_attention, _dense),
    "mistral": (_headed_attention, _dense),
    "qwen2": (_headed_attention, _dense),
    "qwen3": (_headed_attention, _dense),
    "mixtral": (_headed_attention, _mixtral),
    "qwen2_moe": (_headed_attention, _qwen_moe),
    "qwen3_moe": (_headed_attention, _qwen_moe),
    "deepseek_v2": (_latent_attention, _deepseek_moe),
    "deepseek_v3": (_latent_attention, _deepseek_moe),
}
