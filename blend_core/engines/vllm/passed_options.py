"""vLLM's own options that pass through to it, by vLLM's names; any other is refused by name."""

import json
import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

from blend_core.errors import ConfigurationError

_NUMBER: Final = (int, float)

PASSED_OPTIONS: Final[dict[str, tuple[type, ...]]] = {
    "tensor_parallel_size": (int,),
    "pipeline_parallel_size": (int,),
    "enable_expert_parallel": (bool,),
    "distributed_executor_backend": (str,),
    "disable_custom_all_reduce": (bool,),
    "dtype": (str,),
    "quantization": (str,),
    "kv_cache_dtype": (str,),
    "max_model_len": (int,),
    "gpu_memory_utilization": _NUMBER,
    "kv_cache_memory_bytes": (int,),
    "num_gpu_blocks_override": (int,),
    "cpu_offload_gb": _NUMBER,
    "enforce_eager": (bool,),
    "compilation_config": (dict, int),
    "cudagraph_capture_sizes": (list,),
    "optimization_level": (int,),
    "attention_backend": (str,),
    "async_scheduling": (bool,),
    "load_format": (str,),
    "tokenizer_mode": (str,),
    "trust_remote_code": (bool,),
    "hf_overrides": (dict,),
    "structured_outputs_config": (dict,),
    "max_loras": (int,),
    "max_lora_rank": (int,),
    "max_cpu_loras": (int,),
    "lora_dtype": (str,),
    "fully_sharded_loras": (bool,),
}
"""vLLM's options that pass through, with the types of their values."""

OWN_OPTIONS: Final[dict[str, tuple[type, ...]]] = {"lora_adapters": (dict,), "separate_core": (bool,)}
"""Options of ours: folders of LoRA adapters by name; whether vLLM's core runs in a process of its own."""

KNOWN_OPTIONS: Final[dict[str, tuple[type, ...]]] = PASSED_OPTIONS | OWN_OPTIONS
"""All that may be given."""

_LEAST: Final = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "kv_cache_memory_bytes": 1,
    # vLLM keeps one block as padding.
    "num_gpu_blocks_override": 2,
    "cpu_offload_gb": 0,
    "max_loras": 1,
    "max_cpu_loras": 1,
}

LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `max_lora_rank`."""

_KINDS: Final = {
    bool: "true or false",
    int: "a whole number",
    str: "a text",
    list: "a list",
    dict: "an object of names and values",
}

CLOSED_OPTIONS: Final[dict[str, tuple[str | int, ...]]] = {
    "dtype": ("auto", "bfloat16", "float16", "half", "float32", "float"),
    "kv_cache_dtype": (
        "auto",
        "bfloat16",
        "float16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
        "fp8_inc",
        "fp8_ds_mla",
        "fp8_per_token_head",
        "int8_per_token_head",
        "int4_per_token_head",
        "nvfp4",
        "nvfp4_4over6",
        "nvfp4_ds_mla",
        "turboquant_k8v4",
        "turboquant_4bit_nc",
        "turboquant_k3v4_nc",
        "turboquant_3bit_nc",
        "ultraquant_4bit",
    ),
    "lora_dtype": ("auto", "bfloat16", "float16"),
    "optimization_level": (0, 1, 2, 3),
}
"""Options of which vLLM takes these values and no others, by name.

Not those to which its plugins add values (`quantization`, `load_format`, `tokenizer_mode`,
`attention_backend`), nor `distributed_executor_backend`, which may be the path of a class.
"""

AS_LONG_AS_FITS: Final = -1
"""What vLLM takes as `max_model_len` beside lengths: as long as KV has room for, at most the model's own."""

_SET_ELSEWHERE: Final = {
    "model": "the job's `model`",
    "seed": "the job's `options.seed`",
    "max_num_seqs": "BLEND_ENGINE__MAX_NUM_SEQS",
    "max_num_batched_tokens": "BLEND_ENGINE__MAX_NUM_BATCHED_TOKENS",
    "block_size": "BLEND_ENGINE__BLOCK_SIZE",
    "enable_lora": "`lora_adapters`",
    "device": "BLEND_ENGINE__DEVICE",
}


def options_of_texts(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with texts read as JSON where a value of another type is wanted: a variable is a text."""
    return {
        name: _read(value) if isinstance(value, str) and str not in KNOWN_OPTIONS.get(name, (str,)) else value
        for name, value in options.items()
    }


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def check_passed_options(options: Mapping[str, Any]) -> None:
    """Checks names, types and ranges.

    Raises:
        ConfigurationError: an option is unknown, is set elsewhere, or has a value of another type or one that
            can never be right.
    """
    for name, value in options.items():
        types = KNOWN_OPTIONS.get(name)
        if types is None and name in _SET_ELSEWHERE:
            raise ConfigurationError(f"The vLLM option {name!r} is set by {_SET_ELSEWHERE[name]} here.")
        if types is None:
            raise _unknown_option(name)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = "a number" if float in types else " or ".join(_KINDS[one] for one in types)
            raise ConfigurationError(f"The vLLM option {name!r} is {value!r}; it must be {wanted}.")
        _check_range(name, value)
        if isinstance(value, dict | list) and not _can_be_kept(value):
            raise ConfigurationError(
                f"The vLLM option {name!r} has a part that a job cannot keep: NaN, infinity, or one that "
                "holds itself; correct it or leave it out."
            )
    adapters = options.get("lora_adapters", {})
    if not all(isinstance(part, str) and part for item in adapters.items() for part in item):
        raise ConfigurationError("The vLLM option 'lora_adapters' maps names to folders, both texts.")


def _check_range(name: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        right = "it must be a finite number"
    elif name == "max_lora_rank" and value not in LORA_RANKS:
        right = f"give one of {', '.join(map(str, LORA_RANKS))}"
    elif name == "max_model_len" and value < 1 and value != AS_LONG_AS_FITS:
        right = (
            f"give a number of tokens from 1, {AS_LONG_AS_FITS} for as many as KV has room for, or leave the "
            "option out"
        )
    elif name in _LEAST and value < _LEAST[name]:
        right = f"it must be at least {_LEAST[name]}"
    elif name == "gpu_memory_utilization" and not 0 < value <= 1:
        right = "it is a share of the memory, above 0 and at most 1"
    else:
        return
    raise ConfigurationError(f"The vLLM option {name!r} is {value!r}; {right}.")


def _can_be_kept(value: Any) -> bool:
    """Whether it comes back from a stored job as it was: of NaN that would make null."""
    try:
        json.dumps(value, allow_nan=False, skipkeys=True, default=str)
    except (ValueError, RecursionError):
        return False
    return True


def _unknown_option(name: str) -> ConfigurationError:
    known = sorted(KNOWN_OPTIONS)
    nearest = get_close_matches(name, known, n=1)
    meant = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return ConfigurationError(
        f"The vLLM option {name!r} is not known{meant}; those that are: {', '.join(known)}."
    )


def check_closed_options(options: Mapping[str, Any]) -> None:
    """Checks the options of which vLLM takes certain values only.

    Not with the others: a stored job that has a wrong one must still be read, to be cancelled.

    Raises:
        ConfigurationError: one has another value; names those that there are, the nearest first.
    """
    for name, values in CLOSED_OPTIONS.items():
        if name in options and options[name] not in values:
            known = list(map(str, values))
            nearest = get_close_matches(str(options[name]), known)
            told = ", ".join(dict.fromkeys([*nearest, *known]))
            raise ConfigurationError(f"The vLLM option {name!r} is {options[name]!r}; give one of {told}.")


def check_options_on_cpu(options: Mapping[str, Any]) -> None:
    """Checks for what vLLM cannot do on a CPU, and would say nothing of or fail at in the first step.

    Raises:
        ConfigurationError: names the option.
    """
    if options.get("pipeline_parallel_size", 1) > 1:
        raise ConfigurationError(
            "The vLLM option 'pipeline_parallel_size' is for GPUs: vLLM on a CPU fails in the first step of "
            "a pipeline; leave it out, or spread the model by 'tensor_parallel_size'."
        )
    if options.get("async_scheduling", False):
        raise ConfigurationError(
            "The vLLM option 'async_scheduling' is for GPUs: vLLM on a CPU never schedules ahead; leave it "
            "out."
        )
