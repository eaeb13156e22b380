"""The options `max_model_len` and `tensor_parallel_size` held against the model's configuration, without
vLLM: it refuses them only when it loads the model, behind everything that a job reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from blend_core.engines.vllm.passed_options import AS_LONG_AS_FITS
from blend_core.errors import ConfigurationError
from blend_core.specs import read_hf_config
from blend_core.wording import count_text

_CONTEXT: Final = "max_position_embeddings"
_HEADS: Final = "num_attention_heads"


def check_model_fit(
    options: Mapping[str, Any], folder: Path, name: str, *, is_any_length_taken: bool
) -> None:
    """Checks that vLLM would take the context that `max_model_len` asks for, and `tensor_parallel_size`.

    Only what is sure is refused: where vLLM reckons a number of its own (scaled rotary positions,
    `hf_overrides`, `model_max_length`, the files of Mistral's own format, a configuration of several
    parts), or is told to take any length, the word is vLLM's.

    Args:
        options: vLLM's options by name, as `check_passed_options` lets them through.
        folder: Hugging Face folder of the model.
        name: the model's name to use in errors.
        is_any_length_taken: whether vLLM is told to take contexts that are longer than the model's.

    Raises:
        ConfigurationError: the context is longer than the model's, the model's attention heads do not divide
            by the processes, or the configuration cannot be read.
    """
    length, num_parts = options.get("max_model_len", AS_LONG_AS_FITS), options.get("tensor_parallel_size", 1)
    is_length_open = length == AS_LONG_AS_FITS or is_any_length_taken
    if (is_length_open and num_parts == 1) or options.get("hf_overrides"):
        return
    config = read_hf_config(folder)
    if not is_length_open:
        _check_context(length, config, folder, name)
    _check_heads(num_parts, config, folder, name)


def _check_context(asked: int, config: Mapping[str, Any], folder: Path, name: str) -> None:
    longest = config.get(_CONTEXT)
    if not isinstance(longest, int) or asked <= longest or _has_other_length(config, folder):
        return
    raise ConfigurationError(
        f"The vLLM option 'max_model_len' is {asked:,}, and the context of model {name} is "
        f"{count_text(longest, 'token')} ({_CONTEXT} in its config.json); give at most that, or leave the "
        "option out."
    )


def _check_heads(num_parts: int, config: Mapping[str, Any], folder: Path, name: str) -> None:
    num_heads = config.get(_HEADS)
    # A model of several parts has a `text_config`, whose word counts.
    is_plain = "text_config" not in config and not _has_mistrals_files(folder)
    if not isinstance(num_heads, int) or num_heads % num_parts == 0 or not is_plain:
        return
    raise ConfigurationError(
        f"The vLLM option 'tensor_parallel_size' is {num_parts:,}, and model {name} has "
        f"{count_text(num_heads, 'attention head')} ({_HEADS} in its config.json); give a number that "
        "divides them."
    )


def _has_other_length(config: Mapping[str, Any], folder: Path) -> bool:
    ropes = (config.get("rope_scaling"), config.get("rope_parameters"))
    return "model_max_length" in config or any(map(_is_scaled, ropes)) or _has_mistrals_files(folder)


def _has_mistrals_files(folder: Path) -> bool:
    return (folder / "params.json").exists()


def _is_scaled(rope: object) -> bool:
    """Whether rotary positions, or those of a kind of layer, may be scaled beyond the stated context.

    Those of Llama 3 are scaled, and its context is stated with it.
    """
    if not isinstance(rope, dict):
        return False
    kind = rope.get("rope_type", rope.get("type"))
    return ("factor" in rope and kind != "llama3") or any(map(_is_scaled, rope.values()))
