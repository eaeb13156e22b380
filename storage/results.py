"""Reading back: counts, results, densities."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import numpy.typing as npt

from storage.database import Database
from storage.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests of a job by state."""

    total: int
    succeeded: int
    errored: int
    expired: int
    cancelled: int

    @property
    def pending(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A request with its result; status None while it is pending."""

    seq: int
    custom_id: str | None
    source_uri: str
    source_line: int
    endpoint: str | None
    status: str | None
    output_text: str | None
    finish_reason: str | None
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_output_tokens: int | None
    error_code: str | None
    error_message: str | None
    started_at: datetime | None
    finished_at: datetime | None
    run_id: str | None
    revision: int | None


@dataclass(frozen=True, slots=True)
class DensityRow:
    """One window of `batch_density`."""

    rank: int
    batch_index: int
    revision: int
    started_at: datetime
    duration_s: float
    predicted_s: float
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_cached_tokens: int
    prefill_tokens_sq: int
    decode_kv_tokens: int
    compute_s: float
    memory_s: float
    planned_density: float | None
    measured_density: float | None
    kv_usage: float
    num_running_left: float
    num_running_right: float
    num_preempted: int
    num_finished: int


@dataclass(frozen=True, slots=True)
class JobMetrics:
    """What a job did, over all its runs. Rates are None where nothing ran."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_batches: int
    busy_s: float
    tokens_per_s: float | None
    output_tokens_per_s: float | None
    prefix_sharing: float | None
    compute_s: float
    memory_s: float
    num_preempted: int


def counts(db: Database, job_id: str) -> Counts:
    """Cheap: reads the counters that are kept in the same transactions as the results."""


def pending_seqs(db: Database, job_id: str) -> npt.NDArray[np.int64]:
    """Valid requests without a result, ascending."""


def iter_results(db: Database, job_id: str, *, objects: ObjectStore | None = None, limit: int | None = None) -> Iterator[ResultRow]:
    """Every request with its result in seq order, streamed; `objects` fetches texts that were too large for a row."""


def densities(db: Database, run_id: str) -> list[DensityRow]:
    """Windows of a run by (started_at, rank, batch_index)."""


def job_metrics(db: Database, job_id: str) -> JobMetrics:
    """Tokens, rates, measured prefix sharing and batches of a job."""
