"""Runs a job to its end in this process: every stage in turn, with Prefect neither needed nor asked."""

from dataclasses import dataclass

from flows.progress import Progress
from flows.wiring import Wiring


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job stands when a run of it is over. `succeeded + errored + expired + cancelled == total`.

    Attributes:
        job_id: the job.
        status: its state, one of OpenAI Batch's.
        total: every non-blank line and every row of the sources, bad ones included.
        succeeded: requests with an answer.
        errored: requests and bad lines with an error row.
        expired: requests without a result when the completion window closed.
        cancelled: requests without a result when the job was cancelled.
        output_uris: exported objects of answers.
        error_uris: exported objects of error rows.
        duration_s: wall time of this run.
    """

    job_id: str
    status: str
    total: int
    succeeded: int
    errored: int
    expired: int
    cancelled: int
    output_uris: tuple[str, ...]
    error_uris: tuple[str, ...]
    duration_s: float


def run_job(wiring: Wiring, job_id: str, progress: Progress) -> JobOutcome:
    """Runs an existing job to its end, or continues it where an earlier run stopped.

    Stages that are complete are not repeated and what has a result is never run twice. SIGINT and SIGTERM cancel
    the job when this runs in the main thread: what has finished is kept and exported.

    Raises:
        ConfigurationError: the job does not exist, its model is unknown, or none of its sources can be read.
        BlendError: the run failed; the job stays resumable (`blend run --job ID` continues it).
    """
    raise NotImplementedError
