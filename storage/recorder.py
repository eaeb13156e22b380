"""Results and windows of a run, written by a thread of its own."""

from types import TracebackType
from typing import Self

from blend_core.engines.base import RequestFailed, RequestFinished, StepWindow
from storage.database import Database
from storage.objects import ObjectStore
from storage.runs import Run


class Recorder:
    """Commits results and windows at the latest every second; calls block while too much waits (back-pressure)."""

    def __init__(self, db: Database, objects: ObjectStore, run: Run, *, flush_interval_s: float = 1.0, max_batch_rows: int = 10_000, max_waiting_rows: int = 40_000, give_up_after_s: float = 600.0) -> None: ...

    def finished(self, event: RequestFinished) -> None:
        """Raises what went wrong in the writer (`StaleRunError`, `StorageUnavailableError`)."""

    def failed(self, event: RequestFailed) -> None: ...

    def window(self, window: StepWindow, *, rank: int, planned_density: float | None) -> None: ...

    def flush(self) -> None:
        """Returns when everything given so far is committed."""

    def close(self) -> None:
        """Flushes, ends the thread, raises what went wrong. Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
