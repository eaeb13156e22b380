"""Folders of LoRA adapters, checked without vLLM: it reads one at the first request that names it, and dies
of one that is none."""

import json
from collections.abc import Mapping
from typing import Any, Final

from blend_core.engines.vllm.passed_options import LORA_RANKS
from blend_core.errors import ConfigurationError
from blend_core.model_store import folder_at, is_whole

DEFAULT_MAX_LORA_RANK: Final = 16
"""vLLM's own, where `max_lora_rank` is not given."""

_CONFIG: Final = "adapter_config.json"
_MODULES_TO_SAVE: Final = ("classifier", "score")
# Only where training began: what it came to is a plain adapter.
_PLAIN_INITS: Final = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
_KINDS: Final = {
    "use_dora": "a DoRA adapter",
    "lora_bias": "an adapter with biases of its own (`lora_bias`)",
    "alora_invocation_tokens": "an Activated LoRA adapter (`alora_invocation_tokens`)",
    "layer_replication": "an adapter that repeats layers (`layer_replication`)",
    "use_bdlora": "a block-diagonal adapter (`use_bdlora`)",
    "use_qalora": "a QALoRA adapter",
}
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def check_adapter_folders(options: Mapping[str, Any]) -> None:
    """Checks the folders of `lora_adapters` on this machine.

    Args:
        options: vLLM's options and ours by name, as they are passed.

    Raises:
        ConfigurationError: one is not there, lacks its configuration or its weights, has weights that are
            not whole, is of a higher rank than `max_lora_rank`, or of a kind that vLLM does not serve; names
            adapter and folder.
    """
    max_rank = options.get("max_lora_rank", DEFAULT_MAX_LORA_RANK)
    for name, folder in options.get("lora_adapters", {}).items():
        reason = _fault(folder, max_rank)
        if reason is not None:
            raise ConfigurationError(f"The LoRA adapter {name!r} cannot be used: {folder} {reason}.")


def _fault(path: str, max_rank: int) -> str | None:
    folder = folder_at(path)
    if folder is None:
        return (
            "is no folder of this machine; put it there, or name another in `lora_adapters` (a job that was "
            "submitted keeps its own)"
        )
    try:
        config = json.loads((folder / _CONFIG).read_bytes())
        ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
    except FileNotFoundError:
        return f"holds no {_CONFIG}, so it is no adapter; name the folder that does"
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return f"has a {_CONFIG} that does not tell the adapter's rank `r`; export the adapter again"
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        return f"has a {_CONFIG} whose rank `r` is no number from 1; export the adapter again"
    enough = [rank for rank in LORA_RANKS if rank >= max(ranks)]
    if not enough:
        return f"is of rank {max(ranks)}, and vLLM serves up to {LORA_RANKS[-1]}; train one of a lower rank"
    if max(ranks) > max_rank:
        return (
            f"is of rank {max(ranks)}, and `max_lora_rank` is {max_rank}; set the vLLM option "
            f"`max_lora_rank` to {enough[0]}"
        )
    unserved = _unserved(config)
    if unserved is not None:
        return f"is {unserved}, which vLLM does not serve; train or export it as a plain LoRA adapter"
    if not any((folder / weights).is_file() for weights in _WEIGHTS):
        return f"holds no {_WEIGHTS[0]}; name the folder that does"
    if (folder / _WEIGHTS[0]).is_file() and not is_whole(folder / _WEIGHTS[0]):
        return f"holds an {_WEIGHTS[0]} that is not whole; copy or export the adapter again"
    return None


def _unserved(config: Mapping[str, Any]) -> str | None:
    """What an adapter is that vLLM refuses, None for one that it takes: as `PEFTHelper.validate_legal` of
    vLLM 0.32 has it."""
    for name, kind in _KINDS.items():
        if config.get(name):
            return kind
    if config.get("bias", "none") != "none":
        return f"an adapter that trained biases (`bias` {config['bias']!r})"
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        return f"an adapter whose training altered the base model (`init_lora_weights` {init!r})"
    saved = config.get("modules_to_save") or []
    others = [name for name in saved if name not in _MODULES_TO_SAVE] if isinstance(saved, list) else [saved]
    if others:
        return (
            f"an adapter that comes with modules of its own (`modules_to_save` {', '.join(map(str, others))})"
        )
    return None
