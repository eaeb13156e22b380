"""The option `max_model_len` held against the model's configuration, without vLLM: it refuses a longer
context only when it loads the model, behind everything that a job reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from blend_core.errors import ConfigurationError
from blend_core.specs import read_hf_config
from blend_core.wording import count_text

_CONTEXT: Final = "max_position_embeddings"


def check_context_length(
    options: Mapping[str, Any], folder: Path, name: str, *, is_any_length_taken: bool
) -> None:
    """Checks that vLLM would take the context that `max_model_len` asks for.

    Only what is sure is refused: where vLLM reckons a length of its own (scaled rotary positions,
    `hf_overrides`, `model_max_length`, the files of Mistral's own format), or is told to take any, the word
    is vLLM's.

    Args:
        options: vLLM's options by name, as they are passed.
        folder: Hugging Face folder of the model.
        name: the model's name to use in errors.
        is_any_length_taken: whether vLLM is told to take contexts that are longer than the model's.

    Raises:
        ConfigurationError: the context is longer than the model's, or the configuration cannot be read.
    """
    asked = options.get("max_model_len", -1)
    if asked < 1 or options.get("hf_overrides") or is_any_length_taken:
        return
    config = read_hf_config(folder)
    longest = config.get(_CONTEXT)
    if not isinstance(longest, int) or asked <= longest or _has_other_length(config, folder):
        return
    raise ConfigurationError(
        f"The vLLM option 'max_model_len' is {asked:,}, and the context of model {name} is "
        f"{count_text(longest, 'token')} ({_CONTEXT} in its config.json); give at most that, or leave the "
        "option out."
    )


def _has_other_length(config: Mapping[str, Any], folder: Path) -> bool:
    ropes = (config.get("rope_scaling"), config.get("rope_parameters"))
    return "model_max_length" in config or any(map(_is_scaled, ropes)) or (folder / "params.json").exists()


def _is_scaled(rope: object) -> bool:
    """Whether rotary positions, or those of a kind of layer, may be scaled beyond the stated context.

    Those of Llama 3 are scaled, and its context is stated with it.
    """
    if not isinstance(rope, dict):
        return False
    kind = rope.get("rope_type", rope.get("type"))
    return ("factor" in rope and kind != "llama3") or any(map(_is_scaled, rope.values()))
