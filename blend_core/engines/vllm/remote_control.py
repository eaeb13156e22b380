"""The scheduler in a process of its own: calls one way, reports the other way, over a local socket.

The run listens at a socket in a folder that only its user may enter; the scheduler connects twice when it is
made. A thread beside vLLM's loop answers calls, so that they are answered while the loop waits for work.
"""

import shutil
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Final

from blend_core.engines.vllm.control import LocalControl, Report
from blend_core.errors import BlendError, EngineDiedError
from blend_core.plan import Plan
from blend_core.policies.base import EngineLimits

ADDRESS_KEY: Final = "blend_scheduler_address"
"""Where vLLM's `additional_config` says where the run listens."""

_CALLS: Final = frozenset({"limits", "start", "revise", "upcoming", "drop", "release"})


def serve_control(address: str, control: LocalControl) -> Connection:
    """In the scheduler's process: answers calls from now on; returns the connection that reports go to."""
    calls = Client(address)
    reports = Client(address)
    threading.Thread(target=_answer, args=(calls, control), name="blend-control", daemon=True).start()
    return reports


def _answer(calls: Connection, control: LocalControl) -> None:
    while True:
        try:
            name, arguments = calls.recv()
        except (EOFError, OSError):
            return
        assert name in _CALLS, f"{name!r} is no call"
        try:
            answer: Any = getattr(control, name)(*arguments)
        except BlendError as error:
            answer = error
        try:
            calls.send(answer)
        except OSError:
            return


class RemoteControl:
    """The run's side: a `SchedulerControl`, and the reports.

    Attributes:
        address: what the scheduler is to connect to.
    """

    def __init__(self) -> None:
        """Listens; `accept` waits for the scheduler."""
        self._folder = Path(tempfile.mkdtemp(prefix="blend-vllm-"))
        self.address = str(self._folder / "scheduler")
        self._listener: Listener | None = Listener(self.address, family="AF_UNIX", backlog=2)
        self._calls: Connection | None = None
        self._reports: Connection | None = None

    def accept(self) -> None:
        """Takes the scheduler's two connections, which it has made when vLLM is up."""
        assert self._listener is not None, "the control is closed"
        self._calls = self._listener.accept()
        self._reports = self._listener.accept()

    def close(self) -> None:
        """Ends both connections and removes the socket. Idempotent."""
        for end in (self._calls, self._reports, self._listener):
            if end is not None:
                end.close()
        self._calls = self._reports = self._listener = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def next_report(self, timeout_s: float) -> Report | None:
        """The next report, or None when none comes in time.

        Raises:
            EngineDiedError: the scheduler's process is gone, and every report of it was read.
        """
        assert self._reports is not None, "the scheduler has not connected"
        try:
            if not self._reports.poll(timeout_s):
                return None
            report: Report = self._reports.recv()
        except (EOFError, OSError):
            raise _gone() from None
        return report

    def limits(self) -> EngineLimits:
        """See `SchedulerControl`."""
        limits = self._call("limits")
        assert isinstance(limits, EngineLimits)
        return limits

    def start(self, policy: str, plan: Plan) -> None:
        """See `SchedulerControl`."""
        self._call("start", policy, plan)

    def revise(self, plan: Plan) -> None:
        """See `SchedulerControl`."""
        self._call("revise", plan)

    def upcoming(self, num_requests: int) -> Sequence[int]:
        """See `SchedulerControl`."""
        seqs: Sequence[int] = self._call("upcoming", num_requests)
        return seqs

    def drop(self, seqs: Sequence[int]) -> None:
        """See `SchedulerControl`."""
        self._call("drop", tuple(seqs))

    def release(self, seqs: Sequence[int]) -> tuple[int, ...]:
        """See `SchedulerControl`."""
        released: tuple[int, ...] = self._call("release", tuple(seqs))
        return released

    def _call(self, name: str, *arguments: object) -> Any:
        assert self._calls is not None, "the scheduler has not connected"
        try:
            self._calls.send((name, arguments))
            answer = self._calls.recv()
        except (EOFError, OSError):
            raise _gone() from None
        if isinstance(answer, BlendError):
            raise answer
        return answer


def _gone() -> EngineDiedError:
    return EngineDiedError(
        "vLLM's engine core ended; the log on standard error tells why. Its unfinished requests run again."
    )
