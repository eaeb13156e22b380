"""A lock on a device of this machine that lasts as long as the engine on it, whatever becomes of its parent.

The lock in the database (`flows.device_lock`) ends with the process that runs the job. Where that process is
killed, its engine notices within moments, and until then it still has the device's memory. So the engine
inherits an open file that is locked: the kernel gives the lock back when the last process that has it open is
gone. Processes that an engine starts may not have it: the engine's own ends after them (`process_group`).
"""

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from blend_core.errors import ConfigurationError
from flows.stopping import StopSignal

POLL_INTERVAL_S = 0.1


@contextmanager
def device_file(
    place: str, *, device: str, stop: StopSignal, waiting: Callable[[str], None]
) -> Iterator[int | None]:
    """Locks a file for a device and yields its descriptor, for the engine process to inherit.

    Waits for the engine of a run that died to be gone. Yields None when asked to stop while waiting.

    Args:
        place: whose lock it is: runs of another database do not wait for it.
        device: what is locked, by name.
        stop: ends the wait.
        waiting: called once if there is something to wait for, with a sentence that says what.

    Raises:
        ConfigurationError: the folder for temporary files takes no file.
    """
    digest = hashlib.sha256(f"{device} of {place}".encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"blend-engine-{os.getuid()}-{digest}.lock"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"The lock file {path} cannot be opened ({error.strerror}); let TMPDIR name a folder of yours."
        ) from error
    try:
        yield file if _lock(file, device, stop, waiting) else None
    finally:
        os.close(file)


def _lock(file: int, device: str, stop: StopSignal, waiting: Callable[[str], None]) -> bool:
    told = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not told:
                waiting(f"Waiting for the engine of a run that died to leave {device}.")
                told = True
            if stop.wait(POLL_INTERVAL_S):
                return False
        else:
            return True
