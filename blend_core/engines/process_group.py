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

    Where this process has no descriptor left to look with, it kills another group all the same.

    Args:
        group: its number, which must not be another group's by now.
    """
    if group != os.getpgrp():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    with suppress(OSError, ImportError):
        _end_others(group)


def _end_others(group: int) -> None:
    # One by one: this process may be of the group, and has to wait for the others.
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
            # One that has ended stays until its parent looks, which may be never. It counts its threads: the
            # first may have ended before others, which work on or still hold what they all had.
            has_ended = is_of_it and process.status() == psutil.STATUS_ZOMBIE and process.num_threads() == 1
            if is_of_it and not has_ended:
                yield process.pid
