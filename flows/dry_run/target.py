"""What a dry run plans for: a model on one or several devices, and the limits of the engine there."""

from dataclasses import dataclass, replace
from typing import Final

from blend_core.errors import ConfigurationError
from blend_core.performance import MAX_NUM_BATCHED_TOKENS, num_kv_blocks
from blend_core.policies.base import EngineLimits
from blend_core.specs import DeviceProfile, ModelSpec
from blend_core.wording import count_text
from flows.numbers import MAX_TENSOR_PARALLEL
from flows.serving import Serving

LARGE_NUM_SEQS: Final = 1024
"""Requests in flight at most on a device that is not the engine's own."""

PROFILED_WEIGHT_BYTES: Final = 2 * 8_030_261_248
"""Device profiles state KV beside the weights of an 8B model in two bytes."""

LEAST_KV_SHARE: Final = 0.2
"""Share of its profiled KV that a device must keep beside its part of larger weights."""

_NUMBERS_OF_DEVICES: Final = (1, 2, 4, 8, 16, 32, MAX_TENSOR_PARALLEL)


@dataclass(frozen=True, slots=True)
class Target:
    """A model on the devices of one replica.

    Attributes:
        model: the model.
        device: abilities of all devices of a replica together.
        limits: of an engine on them.
        tensor_parallel: devices of a replica.
        engine: name of the engine that is planned for, None for devices that are not here.
    """

    model: ModelSpec
    device: DeviceProfile
    limits: EngineLimits
    tensor_parallel: int
    engine: str | None = None


def own_target(model: ModelSpec, device: DeviceProfile, serving: Serving) -> Target:
    """Returns the engine that is planned for, with this machine's settings; the profile gets its KV.

    Of a model that vLLM spreads over several GPUs the KV of all counts, and the compute of one.
    """
    if serving.kv_capacity_bytes is not None:
        device = replace(device, kv_capacity_bytes=float(serving.kv_capacity_bytes))
    limits = serving.limits(model, device)
    return Target(model, device, limits, tensor_parallel=1, engine=serving.engine.value)


def target_of(
    model: ModelSpec, device: DeviceProfile, block_size: int, tensor_parallel: int | None = None
) -> Target:
    """Returns what the model needs of a device that is not here: one, or as many as hold its weights.

    A model that is larger than what the profile was made with takes its room from KV. Where too little is
    left it is run by tensor parallelism on 2, 4, 8, … devices; communication between them is not counted.
    With fewer KV heads than devices, and with latent KV, devices keep copies, so that less of it fits. Heads
    are never cut: engines refuse numbers of devices that do not go into them.

    Args:
        model: what runs.
        device: abilities of one device.
        block_size: tokens of a KV block.
        tensor_parallel: devices of a replica; None takes the smallest of those numbers.

    Raises:
        ConfigurationError: no number of devices is enough, or not the one asked for, or it would cut heads.
    """
    if tensor_parallel is None:
        numbers = tuple(number for number in _NUMBERS_OF_DEVICES if _shares_heads(model, number))
    elif _shares_heads(model, tensor_parallel):
        numbers = (tensor_parallel,)
    else:
        sharing = (number for number in range(1, MAX_TENSOR_PARALLEL + 1) if _shares_heads(model, number))
        raise ConfigurationError(
            f"{count_text(tensor_parallel, 'device')} cannot share the heads of {model.name}; name one of "
            f"{', '.join(map(str, sharing))}."
        )
    weights = model.num_parameters * model.dtype_bytes
    for num_devices in numbers:
        excess = max(weights - PROFILED_WEIGHT_BYTES * num_devices, 0)
        all_kv = device.kv_capacity_bytes * num_devices
        if all_kv - excess >= LEAST_KV_SHARE * all_kv:
            break
    else:
        raise ConfigurationError(
            f"{model.name} does not fit {count_text(numbers[-1], 'device')} of {device.name}; name a larger "
            f"one{'' if tensor_parallel is None else ', or more of them'}."
        )
    num_heads = 1 if model.latent_kv_size is not None else model.num_kv_heads
    if num_devices > 1:
        device = device.scaled(num_devices)
    kv_bytes = (all_kv - excess) * min(num_heads, num_devices) / num_devices
    device = replace(device, kv_capacity_bytes=kv_bytes)
    limits = EngineLimits(
        block_size=block_size,
        num_blocks=num_kv_blocks(model, device.kv_capacity_bytes, block_size),
        max_num_seqs=LARGE_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    return Target(model, device, limits, num_devices)


def _shares_heads(model: ModelSpec, num_devices: int) -> bool:
    """Whether so many devices get equal numbers of attention heads, and of KV heads or of their copies."""
    if model.num_heads % num_devices:
        return False
    is_copied = model.latent_kv_size is not None or num_devices % model.num_kv_heads == 0
    return is_copied or model.num_kv_heads % num_devices == 0
