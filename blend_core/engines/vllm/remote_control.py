"""The scheduler in a process of its own: calls one way, reports the other way.

The run listens at a socket in a folder that only its user may enter. The scheduler connects twice when it is
made, for calls and for steps, and opens the file for admissions beside the socket. A thread of its process
answers calls, so that they are answered while vLLM's loop waits for work.
"""

import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Final

from blend_core.engines.vllm.admission_log import AdmissionLog
from blend_core.engines.vllm.control import LocalControl
from blend_core.engines.vllm.core_log import CoreLog, core_died
from blend_core.engines.vllm.reports import Report, Stepped
from blend_core.errors import BlendError, ConfigurationError
from blend_core.plan import Plan
from blend_core.policies.base import EngineLimits

ADDRESS_KEY: Final = "blend_scheduler_address"
"""Where vLLM's `additional_config` says where the run listens."""

_LONGEST_PLACE: Final = (107 if sys.platform == "linux" else 103) - len("/") - 36
"""Characters of a folder in which vLLM may listen: a socket's path has room for so many, and vLLM names its
sockets by 36."""

_CALLS: Final = frozenset({"limits", "start", "revise", "upcoming", "withdraw", "release", "tell_all"})


def admission_file(address: str) -> Path:
    """Where the scheduler writes its admissions."""
    return Path(f"{address}.admissions")


class StepSender:
    """In the scheduler's process: sends steps to the run."""

    def __init__(self, address: str) -> None:
        """Connects to the run, before `serve_calls` does."""
        self._connection = Client(address)

    def __call__(self, steps: list[Stepped]) -> None:
        """Sends them together; waits while the run reads nothing and has left no room."""
        self._connection.send(steps)


def serve_calls(address: str, control: LocalControl) -> None:
    """In the scheduler's process: connects to the run and answers its calls from now on."""
    calls = Client(address)
    threading.Thread(target=_answer, args=(calls, control), name="blend-control", daemon=True).start()


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
        log: what ended its process, or another one of vLLM's.
    """

    def __init__(self, num_admissions: int) -> None:
        """Listens; `accept` waits for the scheduler.

        Args:
            num_admissions: more than may be told and not read.

        Raises:
            ConfigurationError: the folder for temporary files has too long a name for sockets in it.
        """
        place = tempfile.gettempdir()
        if len(place) > _LONGEST_PLACE:
            raise ConfigurationError(
                f"The name of the folder for temporary files, {place}, is too long for vLLM's sockets; let "
                f"TMPDIR name one of at most {_LONGEST_PLACE - len('/blend-12345678')} characters."
            )
        self.log = CoreLog()
        self._folder = Path(tempfile.mkdtemp(prefix="blend-vllm-"))
        self.address = str(self._folder / "scheduler")
        self._admissions = AdmissionLog(admission_file(self.address), num_admissions)
        self._listener: Listener | None = Listener(self.address, family="AF_UNIX", backlog=2)
        self._calls: Connection | None = None
        self._steps: Connection | None = None

    def accept(self) -> None:
        """Takes the scheduler's two connections, which it has made when vLLM is up.

        Of them nothing is left on disk then: an engine's process may be killed at any time.
        """
        assert self._listener is not None, "the control is closed"
        self._steps = self._listener.accept()
        self._calls = self._listener.accept()
        self._listener.close()
        self._listener = None
        shutil.rmtree(self._folder)

    def close(self) -> None:
        """Ends both connections, and what there was before them. Idempotent."""
        for end in (self._calls, self._steps, self._listener):
            if end is not None:
                end.close()
        self._calls = self._steps = self._listener = None
        self._admissions.close()
        self.log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def reports(self, timeout_s: float = 0.0) -> Iterator[Report]:
        """Yields the admissions that were told, and the steps that were or come within `timeout_s`.

        Raises:
            EngineDiedError: the scheduler's process is gone, and every report of it was read.
            EngineError: admissions were overwritten before they were read.
        """
        if self._steps is None:
            raise core_died()
        yield from self._admissions.read()
        try:
            while self._steps.poll(timeout_s):
                yield from self._steps.recv()
        except (EOFError, OSError):
            raise core_died() from None

    def limits(self) -> EngineLimits:
        """See `SchedulerControl`."""
        limits = self._call("limits")
        assert isinstance(limits, EngineLimits)
        return limits

    def start(self, policy: str, plan: Plan) -> int:
        """See `SchedulerControl`."""
        number: int = self._call("start", policy, plan)
        return number

    def revise(self, plan: Plan) -> None:
        """See `SchedulerControl`."""
        self._call("revise", plan)

    def upcoming(self, num_requests: int) -> Sequence[int]:
        """See `SchedulerControl`."""
        seqs: Sequence[int] = self._call("upcoming", num_requests)
        return seqs

    def withdraw(self, seqs: Sequence[int], queued: Sequence[int]) -> None:
        """See `SchedulerControl`."""
        self._call("withdraw", tuple(seqs), tuple(queued))

    def release(self, seqs: Sequence[int]) -> tuple[int, ...]:
        """See `SchedulerControl`."""
        released: tuple[int, ...] = self._call("release", tuple(seqs))
        return released

    def tell_all(self) -> None:
        """See `SchedulerControl`. What it has reported is in `reports` when this returns."""
        self._call("tell_all")

    def _call(self, name: str, *arguments: object) -> Any:
        if self._calls is None:
            # A run may be given up after its engine was closed.
            raise core_died()
        try:
            self._calls.send((name, arguments))
            answer = self._calls.recv()
        except (EOFError, OSError):
            raise core_died() from None
        if isinstance(answer, BlendError):
            raise answer
        return answer
