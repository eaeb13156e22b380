"""What every stage of a run is given."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flows.job_spec import BatchJobSpec
from flows.progress import Progress
from flows.stopping import StopSignal
from flows.wiring import Wiring
from storage.ownership import Run

RunTogether = Callable[[Mapping[str, Callable[[], None]]], None]


@dataclass(frozen=True, slots=True)
class JobContext:
    """One run of one job.

    Attributes:
        wiring: the parts of this process.
        spec: what the user submitted.
        run: the run's hold on the job.
        stop: when to stop early.
        progress: where to report to.
        run_together: calls everything it is given at the same time, by name, and returns when all have;
            raises the first error then.
    """

    wiring: Wiring
    spec: BatchJobSpec
    run: Run
    stop: StopSignal
    progress: Progress
    run_together: RunTogether

    @property
    def job_id(self) -> str:
        """The job."""
        return self.run.job_id


def run_in_threads(works: Mapping[str, Callable[[], None]]) -> None:
    """The plain `JobContext.run_together`: a thread for each. Threads do not outlive the process."""
    errors: list[BaseException] = []

    def call(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=call, args=(work,), name=name, daemon=True) for name, work in works.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
