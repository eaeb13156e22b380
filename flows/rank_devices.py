"""Which device each rank of a job works on."""

import os
from collections.abc import Sequence

from blend_core.errors import ConfigurationError


def rank_devices(device: str, num_ranks: int | None, num_each: int = 1) -> tuple[str, ...]:
    """Returns the torch device of each rank.

    `cuda` stands for every GPU that this process sees (`CUDA_VISIBLE_DEVICES`), each for one rank; `cuda:1`
    is that one. Ranks on the CPU share it. A rank that needs several has neighbours: `cuda:0,1`.

    Args:
        device: as configured.
        num_ranks: as the job asks; None for one on every device.
        num_each: GPUs that a rank needs.

    Raises:
        ConfigurationError: there are fewer GPUs than ranks.
    """
    if not device.startswith("cuda"):
        return (device,) * (num_ranks or 1)
    devices = [device]
    if device == "cuda":
        # Only here: other devices are counted without torch.
        import torch

        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or [device]
    if num_each > 1:
        devices = _groups(device, len(devices), num_each)
    if num_ranks is not None and num_ranks > len(devices):
        raise ConfigurationError(
            f"The job asks for {num_ranks} ranks, and BLEND_ENGINE__DEVICE={device} is {len(devices)} "
            f"{'GPU' if len(devices) == 1 else 'GPUs'}; lower options.ranks, or leave it out for one on each."
        )
    return tuple(devices[:num_ranks])


def _groups(device: str, num_devices: int, num_each: int) -> list[str]:
    if num_devices < num_each:
        raise ConfigurationError(
            f"A replica needs {num_each} GPUs, and BLEND_ENGINE__DEVICE={device} is {num_devices}; set it to "
            "cuda, or lower the parallel sizes of the job's vLLM options."
        )
    return [
        "cuda:" + ",".join(str(index) for index in range(first, first + num_each))
        for first in range(0, num_devices - num_each + 1, num_each)
    ]


def locked_devices(devices: Sequence[str], visible: str) -> tuple[str, ...]:
    """What a run on these devices locks, sorted: every GPU by itself, `cuda:0,1` as `cuda:0` and `cuda:1`.

    So two runs that spread a model differently never share a GPU.

    Args:
        devices: of its ranks.
        visible: `CUDA_VISIBLE_DEVICES`. The numbers of devices count what it lists, and what it lists is what
            is locked: processes that see different GPUs count them differently.
    """
    names = [name.strip() for name in visible.split(",")] if visible else []
    singles = set()
    for device in devices:
        kind, _, indices = device.partition(":")
        if not indices:
            singles.add(kind)
        for index in filter(None, indices.split(",")):
            is_listed = index.isdigit() and int(index) < len(names)
            singles.add(f"{kind}:{names[int(index)] if is_listed else index}")
    return tuple(sorted(singles))


def threads_of_rank(device: str, devices: Sequence[str]) -> int | None:
    """CPU threads of a rank's engine: its share of the cores where ranks share a CPU, else None, torch's own
    choice.
    """
    num_sharing = devices.count(device)
    return None if num_sharing == 1 else max(1, (os.cpu_count() or 1) // num_sharing)
