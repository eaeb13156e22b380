"""Output and error objects in OpenAI Batch format."""

from dataclasses import dataclass

from storage.database import Database
from storage.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Where the objects are and how many lines each has. `error_uri` is None where every request
    succeeded."""

    output_uri: str
    error_uri: str | None
    num_output: int
    num_error: int


def export_job(db: Database, objects: ObjectStore, job_id: str) -> ExportResult:
    """Streams every result into `jobs/{job_id}/output.jsonl` and `errors.jsonl`, and records both on the job.

    Refused (`StorageError`) while requests are pending: call `close_pending` first for an expired or
    cancelled job. Line counts are checked against the database.
    """
