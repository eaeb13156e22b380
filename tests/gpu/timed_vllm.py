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

    added_s: float = 0.0
    beside_s: float = 0.0
    num_steps: int = 0

    def per_step(self) -> dict[str, float]:
        """Means over the steps, 0 of none."""
        num_steps = max(1, self.num_steps)
        return {"added_s_per_step": self.added_s / num_steps, "beside_s_per_step": self.beside_s / num_steps}


class TellingVllmEngine(VllmEngine):
    """Tells a `SchedulerTime` at the end of a run."""

    def run(self, source: RequestSource) -> Generator[EngineEvent | SchedulerTime]:
        yield from super().run(source)
        yield SchedulerTime(self.added_s, self.beside_s, self.num_steps)


class TimedVllmProcess(EngineProcess):
    """Keeps the time of the latest run.

    Attributes:
        scheduler_time: nothing until the run is through.
    """

    def __init__(self, options: VllmEngineOptions) -> None:
        super().__init__(partial(TellingVllmEngine, options))
        self.scheduler_time = SchedulerTime()

    def run(self, source: RecallingSource) -> Iterator[EngineEvent]:
        self.scheduler_time = SchedulerTime()
        for event in super().run(source):
            if isinstance(event, SchedulerTime):
                self.scheduler_time = event
            else:
                yield event
