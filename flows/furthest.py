"""How far a job has come, also where its stages are done again."""

from blend_core.engines.base import StepWindow
from flows.progress import Progress


class FurthestProgress:
    """Passes on what stages tell, and sees when the job comes further than it ever was in this run.

    A stage that is done again tells what it told before, which brings the job no further.

    Attributes:
        num_advances: how often the job came further: a stage began or ended for the first time, or counted
            more than ever.
    """

    __slots__ = ("_ended", "_furthest", "_stage", "_to", "num_advances")

    def __init__(self, to: Progress) -> None:
        self.num_advances = 0
        self._to = to
        self._stage = ""
        self._furthest: dict[str, int] = {}
        self._ended: set[str] = set()

    def stage_started(self, stage: str, detail: str) -> None:
        """Passes it on."""
        self._stage = stage
        if stage not in self._furthest:
            self._furthest[stage] = 0
            self.num_advances += 1
        self._to.stage_started(stage, detail)

    def stage_finished(self, stage: str, detail: str) -> None:
        """Passes it on."""
        if stage not in self._ended:
            self._ended.add(stage)
            self.num_advances += 1
        self._to.stage_finished(stage, detail)

    def counted(self, num_done: int, num_total: int | None) -> None:
        """Passes it on."""
        if num_done > self._furthest.get(self._stage, 0):
            self._furthest[self._stage] = num_done
            self.num_advances += 1
        self._to.counted(num_done, num_total)

    def window(self, window: StepWindow, rank: int) -> None:
        """Passes it on."""
        self._to.window(window, rank)

    def note(self, message: str) -> None:
        """Passes it on."""
        self._to.note(message)
