"""The vLLM engine in a process of its own, and what our part of the scheduler took there.

The events of an engine do not have it: one more comes after them, and the process's user never sees it.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial

from blend_core.engines.base import EngineEvent, RecallingSource, RequestSource
from blend_core.engines.process import EngineProcess
from blend_core.engines.vllm.engine import VllmEngine
from blend_core.engines.vllm.options import VllmEngineOptions


@dataclass(frozen=True, slots=True)
class SchedulerTime:
    """The event after the last: see the attributes of `VllmEngine`."""

    added_s: float
    num_steps: int


class TellingVllmEngine(VllmEngine):
    """Tells a `SchedulerTime` at the end of a run."""

    def run(self, source: RequestSource) -> Generator[EngineEvent | SchedulerTime]:
        yield from super().run(source)
        yield SchedulerTime(self.added_s, self.num_steps)


class TimedVllmProcess(EngineProcess):
    """Keeps the time of the latest run.

    Attributes:
        added_s_per_step: what our part of the scheduler took in a step, mean over all of them; 0 until the
            run is through.
    """

    def __init__(self, options: VllmEngineOptions) -> None:
        super().__init__(partial(TellingVllmEngine, options))
        self.added_s_per_step = 0.0

    def run(self, source: RecallingSource) -> Iterator[EngineEvent]:
        for event in super().run(source):
            if isinstance(event, SchedulerTime):
                self.added_s_per_step = event.added_s / event.num_steps if event.num_steps else 0.0
            else:
                yield event
