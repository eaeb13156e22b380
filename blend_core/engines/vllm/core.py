"""vLLM's engine core as a run drives it, in this process or in one of its own."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from vllm.v1.engine.exceptions import EngineDeadError

from blend_core.engines.vllm.control import SchedulerControl
from blend_core.engines.vllm.core_log import core_died
from blend_core.engines.vllm.remote_control import RemoteControl
from blend_core.engines.vllm.reports import Report
from blend_core.errors import EngineDiedError
from blend_core.plan import Plan

_WAIT_S: Final = 0.05


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

    def start(self, policy: str, plan: Plan) -> int:
        """Begins a run, whose requests are added from now on; see `SchedulerControl.start`."""

    def step(self) -> Iterator[Any]:
        """Yields `Report`s and vLLM's outputs, those that are there or the first that come.

        Admissions are written down before their step computes anything, and come before its outputs. Raises
        `EngineDiedError` when the core is gone.
        """

    def last_words(self) -> Iterator[Any]:
        """Yields what a core that is gone had told and answered, and `step` has not yielded."""

    def why(self, error: EngineDiedError) -> EngineDiedError:
        """The error that told that the core is gone, or one that tells the reason, where that is known."""

    def last_reports(self) -> Iterator[Report]:
        """Yields what is not reported yet of the steps that are through. Raises like `step`."""

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

    def start(self, policy: str, plan: Plan) -> int:
        """See `Core`."""
        while self._scheduler.has_work():
            # Of what was aborted.
            self._llm_engine.step()
        self._scheduler.take_reports()
        return self.control.start(policy, plan)

    def step(self) -> Iterator[Any]:
        """See `Core`."""
        self._scheduler.prepare()
        yield from self._scheduler.take_reports()
        yield from self._llm_engine.step()
        yield from self._scheduler.take_reports()

    def last_words(self) -> Iterator[Any]:
        """See `Core`: this process would be gone with it."""
        yield from ()

    def why(self, error: EngineDiedError) -> EngineDiedError:
        """See `Core`."""
        return error

    def last_reports(self) -> Iterator[Report]:
        """See `Core`."""
        self.control.tell_all()
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
            raise core_died() from error

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Core`."""
        try:
            self._llm_engine.abort_request(list(request_ids))
        except EngineDeadError as error:
            raise core_died() from error

    def start(self, policy: str, plan: Plan) -> int:
        """See `Core`."""
        # Of an earlier run. Before as well: a scheduler whose pipe to us is full waits, and frees nothing.
        self._pass_over_reports()
        number = self.control.start(policy, plan)
        self._pass_over_reports()
        return number

    def step(self) -> Iterator[Any]:
        """See `Core`."""
        try:
            num_outputs = self._await_outputs()
            # Whatever has outputs was told as admitted before.
            yield from self._remote.reports()
            for _ in range(num_outputs):
                yield from self._llm_engine.step()
        except EngineDeadError as error:
            raise core_died() from error

    def last_words(self) -> Iterator[Any]:
        """See `Core`."""
        # What it admitted last is what it may have died of.
        with suppress(EngineDiedError):
            yield from self._remote.reports(_WAIT_S)
        with suppress(EngineDeadError):
            while not self._llm_engine.engine_core.outputs_queue.empty():
                yield from self._llm_engine.step()

    def why(self, error: EngineDiedError) -> EngineDiedError:
        """See `Core`."""
        words = self._remote.log.words()
        return error if words is None else core_died(words)

    def last_reports(self) -> Iterator[Report]:
        """See `Core`."""
        # Read before, so that there is room for what is told now.
        yield from self._remote.reports()
        self.control.tell_all()
        yield from self._remote.reports()

    def close(self) -> None:
        """See `Core`."""
        self._llm_engine.engine_core.shutdown()
        self._remote.close()

    def _pass_over_reports(self) -> None:
        deque(self._remote.reports(), maxlen=0)

    def _await_outputs(self) -> int:
        """Waits a little for outputs of steps; returns of how many there are. Raises `EngineDeadError`.

        vLLM would wait for ever: when the core ends, nobody puts anything into the queue that it waits at.
        """
        core = self._llm_engine.engine_core
        outputs = core.outputs_queue
        with outputs.not_empty:
            if not outputs.queue:
                core.ensure_alive()
                outputs.not_empty.wait(_WAIT_S)
            return len(outputs.queue)
