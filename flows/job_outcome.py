"""How a job stands when a run of it is over."""

from dataclasses import dataclass

from storage.database import Database
from storage.jobs import get_job


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
        table_uris: exported tables of all requests.
        duration_s: wall time of this run.
        error_message: why the job failed; None where it did not.
        write_back_error: why not every result is in the user's table; None where all are, or none was asked.
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
    table_uris: tuple[str, ...]
    duration_s: float
    error_message: str | None = None
    write_back_error: str | None = None


def job_outcome(database: Database, job_id: str, duration_s: float) -> JobOutcome:
    """How a job stands, after a run of so many seconds."""
    job = get_job(database, job_id)
    return JobOutcome(
        job_id=job_id,
        status=job.status.value,
        total=job.num_total,
        succeeded=job.num_succeeded,
        errored=job.num_errored,
        expired=job.num_expired,
        cancelled=job.num_cancelled,
        output_uris=() if job.output_uri is None else (job.output_uri,),
        error_uris=() if job.error_uri is None else (job.error_uri,),
        table_uris=() if job.table_uri is None else (job.table_uri,),
        duration_s=duration_s,
        error_message=job.error_message,
        write_back_error=job.write_back_error,
    )
