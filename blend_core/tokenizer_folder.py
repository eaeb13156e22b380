"""The tokenizer of a Hugging Face folder, loaded without torch where its class is known beforehand."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

CLASSES: Final[Mapping[tuple[str, str], str]] = {
    ("llama", "PreTrainedTokenizerFast"): "PreTrainedTokenizerFast",
    ("qwen2", "Qwen2Tokenizer"): "Qwen2Tokenizer",
    ("qwen2", "Qwen2TokenizerFast"): "Qwen2Tokenizer",
    ("qwen3", "Qwen2Tokenizer"): "Qwen2Tokenizer",
    ("qwen3", "Qwen2TokenizerFast"): "Qwen2Tokenizer",
}
"""What `AutoTokenizer` takes for a `model_type` and a `tokenizer_class`."""


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer that `AutoTokenizer` loads.

    Of the commonest kinds of folder its class is known, and `AutoTokenizer` itself is not imported: that
    imports torch, which takes seconds.

    Raises:
        Exception: whatever the library raises for a folder that it cannot load.
    """
    import transformers

    config = _read(folder / "tokenizer_config.json")
    kind = (str(_read(folder / "config.json").get("model_type")), str(config.get("tokenizer_class")))
    known = None if "auto_map" in config else CLASSES.get(kind)
    return getattr(transformers, known or "AutoTokenizer").from_pretrained(str(folder), local_files_only=True)


def _read(path: Path) -> dict[str, Any]:
    """Empty for a file that is not there or wrong: the library names what is wrong with it."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
