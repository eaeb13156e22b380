"""Batch jobs: create, read, and move between OpenAI Batch's states."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from storage.database import Database


class JobStatus(StrEnum):
    """OpenAI Batch's states."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        """Whether a job never leaves this state."""


@dataclass(frozen=True, slots=True)
class Job:
    """One row of `batch_job`."""

    job_id: str
    name: str
    status: JobStatus
    model: str
    spec: dict[str, Any]
    idempotency_key: str | None
    created_at: datetime
    in_progress_at: datetime | None
    finalizing_at: datetime | None
    cancelling_at: datetime | None
    finished_at: datetime | None
    expires_at: datetime | None
    ingested_at: datetime | None
    num_total: int
    num_succeeded: int
    num_errored: int
    num_expired: int
    num_cancelled: int
    error_message: str | None
    output_uri: str | None
    error_uri: str | None
    current_run_id: str | None
    fencing_number: int
    manifest: list[dict[str, Any]]


def create_job(db: Database, *, name: str, model: str, spec: dict[str, Any], completion_window_s: float | None = None, idempotency_key: str | None = None) -> str:
    """Writes a job in state validating and returns its id; the same idempotency key returns the same job."""


def get_job(db: Database, job_id: str) -> Job:
    """Raises `StorageError` for an unknown id."""


def list_jobs(db: Database, *, limit: int = 50, status: JobStatus | None = None) -> list[Job]:
    """Newest first."""


def set_job_status(db: Database, job_id: str, status: JobStatus, *, error_message: str | None = None) -> Job:
    """Moves a job. An end state closes what is pending first and is never left again; an illegal move raises `StorageError`.

    A run that dies leaves its job in_progress, so that the next run continues it. COMPLETED is refused while requests are pending;
    EXPIRED records them as expired, CANCELLED and FAILED as cancelled.
    """


def set_job_manifest(db: Database, job_id: str, manifest: list[dict[str, Any]]) -> None:
    """Records what the sources were when they were read (uri, size_bytes, etag, num_lines)."""


def set_job_outputs(db: Database, job_id: str, output_uri: str, error_uri: str | None) -> None:
    """Records where the exported objects are."""


def request_cancel(db: Database, job_id: str) -> JobStatus:
    """Asks a job to stop (validating or in_progress -> cancelling) and returns its state after that."""


def close_pending(db: Database, job_id: str, status: JobStatus) -> int:
    """Gives every request without a result one of status expired or cancelled; returns how many."""
