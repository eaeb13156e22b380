"""vLLM's engine core as a run drives it, in this process or in one of its own."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from vllm.v1.engine.exceptions import EngineDeadError

from blend_core.engines.vllm.control import Report, SchedulerControl, Stepped
from blend_core.engines.vllm.remote_control import RemoteControl
from blend_core.errors import EngineDiedError

_REPORT_WAIT_S: Final = 0.05
_ALIVE_CHECK_S: Final = 0.2


class Core(Protocol):
    """One loaded model with its scheduler.

    Attributes:
        control: the scheduler.
    """

    control: SchedulerControl

    def add(self, request_id: str, prompt: Any, sampling: Any, lora: Any) -> None:
        """Queues a request. Raises what vLLM raises on one that it refuses."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests without an output."""

    def step(self) -> Iterator[Any]:
        """Yields `Report`s and vLLM's outputs as they come, at most up to the end of a step.

        Admissions come before the step computes anything. Raises `EngineDiedError` when the core is gone.
        """

    def close(self) -> None:
        """Frees the device."""


class LocalCore:
    """A core in this process: steps are computed where this is called."""

    def __init__(self, llm_engine: Any) -> None:
        self._llm_engine = llm_engine
        self._scheduler = llm_engine.engine_core.engine_core.scheduler
        self.control: SchedulerControl = self._scheduler.control

    def add(self, request_id: str, prompt: Any, sampling: Any, lora: Any) -> None:
        """See `Core`."""
        self._llm_engine.add_request(request_id, prompt, sampling, lora_request=lora)

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Core`."""
        self._llm_engine.abort_request(list(request_ids))

    def step(self) -> Iterator[Any]:
        """See `Core`."""
        self._scheduler.prepare()
        yield from self._scheduler.take_reports()
        yield from self._llm_engine.step()
        yield from self._scheduler.take_reports()

    def close(self) -> None:
        """See `Core`."""
        self._llm_engine.engine_core.shutdown()


class RemoteCore:
    """A core in a process of its own, which computes on while outputs are read here."""

    def __init__(self, llm_engine: Any, control: RemoteControl) -> None:
        self._llm_engine = llm_engine
        self._remote = control
        self.control: SchedulerControl = control

    def add(self, request_id: str, prompt: Any, sampling: Any, lora: Any) -> None:
        """See `Core`."""
        try:
            self._llm_engine.add_request(request_id, prompt, sampling, lora_request=lora)
        except EngineDeadError as error:
            raise _died(error) from error

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Core`."""
        try:
            self._llm_engine.abort_request(list(request_ids))
        except EngineDeadError as error:
            raise _died(error) from error

    def step(self) -> Iterator[Any]:
        """See `Core`."""
        try:
            report: Report | None = self._remote.next_report(_REPORT_WAIT_S)
        except EngineDiedError:
            yield from self._last_outputs()
            raise
        try:
            if report is None:
                if self._llm_engine.engine_core.outputs_queue.empty():
                    return
                # A step is reported before its outputs are sent: without a report these are none of a step,
                # but of a request that the core could not even queue.
                report = self._remote.next_report(0.0)
                if report is None:
                    yield from self._llm_engine.step()
                    return
            yield report
            if isinstance(report, Stepped) and report.has_outputs:
                self._await_outputs()
                yield from self._llm_engine.step()
        except EngineDeadError as error:
            # What it admitted last is what it may have died of.
            yield from self._last_reports()
            raise _died(error) from error

    def close(self) -> None:
        """See `Core`."""
        self._llm_engine.engine_core.shutdown()
        self._remote.close()

    def _await_outputs(self) -> None:
        """Waits for the outputs of a step that was reported.

        The core may end in between. vLLM then stops what would put anything into the queue that it goes on to
        wait at.
        """
        core = self._llm_engine.engine_core
        outputs = core.outputs_queue
        with outputs.not_empty:
            while not outputs.queue:
                core.ensure_alive()
                outputs.not_empty.wait(_ALIVE_CHECK_S)

    def _last_outputs(self) -> Iterator[Any]:
        """Answers that the core sent before it ended."""
        try:
            while not self._llm_engine.engine_core.outputs_queue.empty():
                yield from self._llm_engine.step()
        except EngineDeadError:
            return

    def _last_reports(self) -> Iterator[Report]:
        try:
            while (report := self._remote.next_report(_REPORT_WAIT_S)) is not None:
                yield report
        except EngineDiedError:
            return


def _died(error: Exception) -> EngineDiedError:
    return EngineDiedError(
        f"vLLM's engine core ended ({type(error).__name__}); the log on standard error tells why. Its "
        "unfinished requests run again."
    )
