"""The end of a process group: its processes are gone, with what they hold of a device, when this returns."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

_LIMIT_S: Final = 10.0
"""Some GPUs take seconds to take their memory back. What takes longer than this is stuck in the kernel."""

_POLL_S: Final = 0.02


def end_group(group: int) -> None:
    """Kills every process of the group but this one, and waits until they are gone, at most ten seconds.

    Args:
        group: its number, which must not be another group's by now.
    """
    # Not all at once by their group: this process may be of it, and has to wait for the others.
    deadline_s = time.monotonic() + _LIMIT_S
    while others := list(_others(group)):
        for pid in others:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            return
        time.sleep(_POLL_S)


def _others(group: int) -> Iterator[int]:
    # Where it is needed alone: every engine's process begins by importing this.
    import psutil

    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            is_of_it = process.pid != os.getpid() and os.getpgid(process.pid) == group
            # One that has ended stays until its parent looks, which may be never.
            if is_of_it and process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid
