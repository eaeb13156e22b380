"""Runs: one attempt at executing a job, held by a lease and numbered by a fencing number."""

from dataclasses import dataclass
from enum import StrEnum

from storage.database import Database
from storage.jobs import JobStatus


class RunStatus(StrEnum):
    """States of a run; all but RUNNING are final."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Run:
    """What a writer must hold to write results of a job."""

    run_id: str
    job_id: str
    fencing_number: int


def start_run(db: Database, job_id: str, *, engine: str, policy: str, details: dict[str, str], lease_s: float) -> Run:
    """Takes the job. While another run's lease is live: `StorageError` with `ids["lease_left_s"]` (whole seconds, rounded up)."""


def heartbeat(db: Database, run: Run, *, lease_s: float) -> JobStatus:
    """Extends the lease; returns the job's state (CANCELLING: stop soon). `StaleRunError` when another run took over."""


def set_run_details(db: Database, run: Run, details: dict[str, str]) -> None:
    """Merges facts into `run.details` (engine versions, limits), known only after the engine is open."""


def finish_run(db: Database, run: Run, status: RunStatus, *, error_message: str | None = None) -> None:
    """Ends the run and gives the job free. A run that was taken over stays as it is."""
