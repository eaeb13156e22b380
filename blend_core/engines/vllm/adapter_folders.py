"""Folders of LoRA adapters, checked without vLLM: it reads one at the first request that names it, and dies
of one that is none."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from blend_core.errors import ConfigurationError

DEFAULT_MAX_LORA_RANK: Final = 16
"""vLLM's own, where `max_lora_rank` is not given."""

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def check_adapter_folders(options: Mapping[str, Any]) -> None:
    """Checks the folders of `lora_adapters` on this machine.

    Args:
        options: vLLM's options and ours by name, as they are passed.

    Raises:
        ConfigurationError: one is not there, lacks its configuration or its weights, or is of a higher rank
            than `max_lora_rank`; names adapter and folder.
    """
    max_rank = options.get("max_lora_rank", DEFAULT_MAX_LORA_RANK)
    for name, folder in options.get("lora_adapters", {}).items():
        reason = _fault(Path(folder).expanduser(), max_rank)
        if reason is not None:
            raise ConfigurationError(f"The LoRA adapter {name!r} cannot be used: {folder} {reason}.")


def _fault(folder: Path, max_rank: int) -> str | None:
    if not folder.is_dir():
        return "is no folder of this machine; correct it in `lora_adapters`"
    try:
        config = json.loads((folder / _CONFIG).read_bytes())
        ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
    except FileNotFoundError:
        return f"holds no {_CONFIG}, so it is no adapter; name the folder that does"
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return f"has a {_CONFIG} that does not tell the adapter's rank `r`; export the adapter again"
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        return f"has a {_CONFIG} whose rank `r` is no number from 1; export the adapter again"
    if max(ranks) > max_rank:
        return (
            f"is of rank {max(ranks)}, and `max_lora_rank` is {max_rank}; set the vLLM option "
            f"`max_lora_rank` to at least {max(ranks)}"
        )
    if not any((folder / weights).is_file() for weights in _WEIGHTS):
        return f"holds no {_WEIGHTS[0]}; name the folder that does"
    return None
