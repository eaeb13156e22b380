"""Who holds a run: written down with it, so that nobody need wait for the lease of a dead process."""

import os
from collections.abc import Mapping
from pathlib import Path

import psutil

_MACHINE, _PID, _STARTED = "holder_machine", "holder_pid", "holder_started_at_s"

# A corrected clock moves the start times that the system tells by seconds.
_SAME_START_S = 60.0


def holder_details() -> dict[str, str]:
    """This process as entries of a run's details."""
    process = psutil.Process()
    return {
        _MACHINE: _machine(),
        _PID: str(process.pid),
        _STARTED: f"{process.create_time():.3f}",
    }


def is_gone(details: Mapping[str, str]) -> bool:
    """Whether the process that wrote these details surely does not run any more.

    False where that cannot be told: for a process of another machine or container, and without details. A
    wrong answer would cost work and no result, since the database refuses what a run writes that was taken
    over.
    """
    pid = holder_pid(details)
    if pid is None:
        return False
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        return bool(abs(process.create_time() - float(details[_STARTED])) > _SAME_START_S)
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, KeyError, ValueError):
        return False


def holder_pid(details: Mapping[str, str]) -> int | None:
    """The pid that the process which wrote these details has here; None for one of another machine."""
    if details.get(_MACHINE) != _machine() or not details.get(_PID, "").isdigit():
        return None
    return int(details[_PID])


def holder_text(details: Mapping[str, str]) -> str:
    """The process that wrote these details, for people."""
    if _MACHINE not in details or _PID not in details:
        return "an unknown process"
    host = details[_MACHINE].split()[0]
    return f"process {details[_PID]} on {host}"


def _machine() -> str:
    """Names this machine since its start, and where there are such, the namespace that its pids count in."""
    parts = [os.uname().nodename]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        parts.append(f"{psutil.boot_time():.0f}")
    return " ".join(parts)
