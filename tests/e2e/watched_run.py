"""A job's run looked at and meddled with while it goes on; its rows and engines counted."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from flows.progress import SilentProgress
from flows.wiring import Wiring
from storage.results import ResultRow, counts, iter_results


class Watching(SilentProgress):
    """Does something once, when enough requests have ended."""

    def __init__(self, num_done: int, action: Callable[[], object]) -> None:
        self.notes: list[str] = []
        self._num_done = num_done
        self._action: Callable[[], object] | None = action
        self._stage = ""

    def stage_started(self, stage: str, detail: str) -> None:
        self._stage = stage

    def counted(self, num_done: int, num_total: int | None) -> None:
        if self._stage == "infer" and num_done >= self._num_done and self._action is not None:
            action, self._action = self._action, None
            action()

    def note(self, message: str) -> None:
        self.notes.append(message)


def wait_for(what: Callable[[], object], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, f"nothing came within {timeout_s:.0f} s"
        time.sleep(0.1)


def engine_pids(parent: int | None = None) -> list[int]:
    """Engine processes that are children of a process, this one by default."""
    wanted = os.getpid() if parent is None else parent
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            actual = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        if actual == wanted and "blend_core.engines.process_child" in command:
            pids.append(int(folder.name))
    return pids


def kill_engine() -> None:
    for pid in engine_pids():
        os.kill(pid, signal.SIGKILL)


def rows_by_status(wiring: Wiring, job_id: str) -> dict[str | None, list[ResultRow]]:
    rows: dict[str | None, list[ResultRow]] = {}
    for row in iter_results(wiring.database, job_id):
        rows.setdefault(row.status, []).append(row)
    return rows


def assert_sums_hold(wiring: Wiring, job_id: str, total: int) -> None:
    standing = counts(wiring.database, job_id)
    rows = rows_by_status(wiring, job_id)
    assert standing.total == total == sum(len(group) for group in rows.values())
    for status in ("succeeded", "errored", "expired", "cancelled"):
        assert getattr(standing, status) == len(rows.get(status, []))
    assert standing.pending == len(rows.get(None, []))
