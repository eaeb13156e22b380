"""What every stage of a run is given."""

from dataclasses import dataclass

from flows.job_spec import BatchJobSpec
from flows.progress import Progress
from flows.stopping import StopSignal
from flows.wiring import Wiring
from storage.ownership import Run


@dataclass(frozen=True, slots=True)
class JobContext:
    """One run of one job.

    Attributes:
        wiring: the parts of this process.
        spec: what the user submitted.
        run: the run's hold on the job.
        stop: when to stop early.
        progress: where to report to.
    """

    wiring: Wiring
    spec: BatchJobSpec
    run: Run
    stop: StopSignal
    progress: Progress

    @property
    def job_id(self) -> str:
        """The job."""
        return self.run.job_id
