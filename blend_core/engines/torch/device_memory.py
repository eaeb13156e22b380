"""A step that needs more memory than the device has."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from blend_core.errors import EngineDiedError

# How torch's own CPU allocator words it, in an error of no class of its own.
_CPU_ALLOCATOR_SAYS = "can't allocate memory"


@contextmanager
def out_of_memory_is_death(device: torch.device) -> Iterator[None]:
    """Turns an allocation that failed in the block into the end of the engine.

    What the step had written is not known then, and neither is what else the allocator lost: only a new
    process is sure to have its memory back.

    Raises:
        EngineDiedError: the memory of `device`, or of this machine, did not suffice.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_plain = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        if is_plain and _CPU_ALLOCATOR_SAYS not in str(error):
            raise
        raise EngineDiedError(
            f"The engine ran out of memory on {device} in mid-step; its unfinished requests run again. "
            "Should it happen often, lower BLEND_ENGINE__KV_GIB or BLEND_ENGINE__MAX_NUM_BATCHED_TOKENS."
        ) from error
