"""What a job did: counts, speed, prefix sharing and the compute density of its batches.

The density of a window is told twice: on the device that ran it, and as a what-if on another device, from the
window's raw token counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from blend_core.performance import step_cost
from blend_core.specs import DeviceProfile, ModelSpec
from storage.database import Database
from storage.jobs import get_job
from storage.plans import load_plan_summary
from storage.results import (
    Counts,
    DensityRow,
    JobMetrics,
    counts,
    densities,
    error_code_counts,
    job_metrics,
)
from storage.runs import latest_run
from storage.suspects import EngineDeath, engine_deaths

NUM_TABLE_ROWS = 12


@dataclass(frozen=True, slots=True)
class BatchDensity:
    """One or more consecutive windows of steps.

    Attributes:
        first_batch: number of the first window, from 0 in the order in which all ranks began theirs.
        last_batch: number of the last one.
        started_s: seconds from the start of the run's first window.
        duration_s: measured time of the steps.
        num_prefill_tokens: prompt tokens computed.
        num_cached_tokens: prompt tokens served from the cache.
        num_decode_tokens: output tokens computed.
        compute_s: seconds of compute at the run's device.
        memory_s: seconds of KV reading at the run's device.
        what_if_compute_s: the same on the other device; None where no other was asked for.
        what_if_memory_s: the same on the other device; None where no other was asked for.
        planned_density: what the plan expected, mean over the windows; None where nothing was simulated.
        kv_usage: mean share of KV blocks in use.
        num_running_left: mean requests in flight from the left side.
        num_running_right: mean requests in flight from the right side.
        num_preempted: preemptions.
    """

    first_batch: int
    last_batch: int
    started_s: float
    duration_s: float
    num_prefill_tokens: int
    num_cached_tokens: int
    num_decode_tokens: int
    compute_s: float
    memory_s: float
    what_if_compute_s: float | None
    what_if_memory_s: float | None
    planned_density: float | None
    kv_usage: float
    num_running_left: float
    num_running_right: float
    num_preempted: int

    @property
    def density(self) -> float | None:
        """Measured density, None where no KV was read."""
        return _ratio(self.compute_s, self.memory_s)

    @property
    def what_if_density(self) -> float | None:
        """Density of the same work on the other device."""
        return _ratio(self.what_if_compute_s, self.what_if_memory_s)


@dataclass(frozen=True, slots=True)
class JobReport:
    """A job as it stands: `counts.succeeded + errored + expired + cancelled + pending == counts.total`.

    Attributes:
        job_id: the job.
        name: its name.
        status: its state.
        model: name of its model.
        engine: engine of its latest run; None before the first.
        policy: admission policy of that run; None before the first.
        device: device profile that the plan was made for; None before there is a plan.
        what_if_device: the other device, None where none was asked for.
        counts: requests by state.
        metrics: tokens, rates and measured sharing.
        planned_sharing: prefix sharing that the first plan promised.
        best_sharing: prefix sharing with an unlimited cache in depth-first order.
        error_codes: error rows by code, most frequent first.
        batches: windows of the job's latest run.
        failure: why the job failed, or its latest run if the job goes on; None where neither did.
        output_uri: exported object of answers; None where there is none.
        error_uri: exported object of error rows; None where there is none.
        table_uri: exported table of all requests; None where there is none.
        write_back_error: why not every result is in the user's table; None where all are, or none was asked.
        engine_deaths: when and why engines of the job died, over all its runs, in order of time.
        took_s: seconds from its submission to its end; None before its end.
    """

    job_id: str
    name: str
    status: str
    model: str
    engine: str | None
    policy: str | None
    device: str | None
    what_if_device: str | None
    counts: Counts
    metrics: JobMetrics
    planned_sharing: float | None
    best_sharing: float | None
    error_codes: dict[str, int]
    batches: tuple[BatchDensity, ...]
    failure: str | None = None
    output_uri: str | None = None
    error_uri: str | None = None
    table_uri: str | None = None
    write_back_error: str | None = None
    engine_deaths: tuple[EngineDeath, ...] = ()
    took_s: float | None = None

    @property
    def density(self) -> float | None:
        """Density over all batches of the latest run."""
        return _ratio(sum(b.compute_s for b in self.batches), sum(b.memory_s for b in self.batches))

    @property
    def what_if_density(self) -> float | None:
        """The same on the other device."""
        return _ratio(
            sum(b.what_if_compute_s or 0.0 for b in self.batches),
            sum(b.what_if_memory_s or 0.0 for b in self.batches),
        )

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "job_id": self.job_id,
            "name": self.name,
            "status": self.status,
            "model": self.model,
            "engine": self.engine,
            "policy": self.policy,
            "failure": self.failure,
            "write_back_error": self.write_back_error,
            "device": self.device,
            "total": self.counts.total,
            "succeeded": self.counts.succeeded,
            "errored": self.counts.errored,
            "expired": self.counts.expired,
            "cancelled": self.counts.cancelled,
            "pending": self.counts.pending,
            "num_prompt_tokens": self.metrics.num_prompt_tokens,
            "num_cached_tokens": self.metrics.num_cached_tokens,
            "num_output_tokens": self.metrics.num_output_tokens,
            "num_batches": self.metrics.num_batches,
            "busy_s": self.metrics.busy_s,
            "took_s": self.took_s,
            "tokens_per_s": self.metrics.tokens_per_s,
            "output_tokens_per_s": self.metrics.output_tokens_per_s,
            "num_preempted": self.metrics.num_preempted,
            "prefix_sharing": {
                "planned": self.planned_sharing,
                "measured": self.metrics.prefix_sharing,
                "best": self.best_sharing,
            },
            "density": {"device": self.device, "measured": self.density},
            "what_if": {"device": self.what_if_device, "density": self.what_if_density},
            "error_codes": self.error_codes,
            "engine_deaths": [death.as_json() for death in self.engine_deaths],
            "batches": [
                asdict(batch) | {"density": batch.density, "what_if_density": batch.what_if_density}
                for batch in self.batches
            ],
        }


def build_report(
    database: Database,
    job_id: str,
    model: ModelSpec | None = None,
    what_if: DeviceProfile | None = None,
) -> JobReport:
    """Reads a job's report. Works at any time, also while the job runs.

    Args:
        database: the platform's tables.
        job_id: the job.
        model: sizes of the job's model; needed for the what-if only.
        what_if: another device to tell the density of the same work for.

    Raises:
        StorageError: there is no such job.
    """
    job = get_job(database, job_id)
    plan = load_plan_summary(database, job_id, revision=0)
    latest = latest_run(database, job_id)
    windows = [] if latest is None else densities(database, latest.run_id)
    run_error = None if latest is None or job.status.is_end else latest.error
    return JobReport(
        job_id=job_id,
        name=job.name,
        status=str(job.status),
        model=job.model,
        engine=None if latest is None else latest.engine,
        policy=None if latest is None else latest.policy,
        device=None if plan is None else plan.device,
        what_if_device=None if what_if is None or model is None else what_if.name,
        counts=counts(database, job_id),
        metrics=job_metrics(database, job_id),
        planned_sharing=None if plan is None else plan.prefix_sharing_planned,
        best_sharing=None if plan is None else plan.prefix_sharing_best,
        error_codes=error_code_counts(database, job_id),
        batches=batch_densities(windows, model, what_if),
        failure=job.error_message or run_error,
        output_uri=job.output_uri,
        error_uri=job.error_uri,
        table_uri=job.table_uri,
        write_back_error=job.write_back_error,
        engine_deaths=tuple(engine_deaths(database, job_id)),
        took_s=None if job.finished_at is None else (job.finished_at - job.created_at).total_seconds(),
    )


def batch_densities(
    windows: Sequence[DensityRow], model: ModelSpec | None, what_if: DeviceProfile | None
) -> tuple[BatchDensity, ...]:
    """Windows, in the order of their start, with the density that the same work has on another device."""
    start = min((window.started_at for window in windows), default=None)
    batches = []
    for number, window in enumerate(windows):
        assert start is not None
        other = None
        if model is not None and what_if is not None:
            num_tokens = window.num_prefill_tokens + window.num_decode_tokens
            other = step_cost(model, what_if, num_tokens, window.prefill_tokens_sq, window.decode_kv_tokens)
        batches.append(
            BatchDensity(
                # Not its index, which every rank counts for itself.
                first_batch=number,
                last_batch=number,
                started_s=(window.started_at - start).total_seconds(),
                duration_s=window.duration_s,
                num_prefill_tokens=window.num_prefill_tokens,
                num_cached_tokens=window.num_cached_tokens,
                num_decode_tokens=window.num_decode_tokens,
                compute_s=window.compute_s,
                memory_s=window.memory_s,
                what_if_compute_s=None if other is None else other.compute_s,
                what_if_memory_s=None if other is None else other.memory_s,
                planned_density=window.planned_density,
                kv_usage=window.kv_usage,
                num_running_left=window.num_running_left,
                num_running_right=window.num_running_right,
                num_preempted=window.num_preempted,
            )
        )
    return tuple(batches)


def merged(batches: Sequence[BatchDensity], num_rows: int = NUM_TABLE_ROWS) -> list[BatchDensity]:
    """At most `num_rows` groups of consecutive windows, evenly filled, for a table that fits a screen."""
    if len(batches) <= num_rows:
        return list(batches)
    bounds = [round(row * len(batches) / num_rows) for row in range(num_rows + 1)]
    return [_merge(batches[start:end]) for start, end in pairwise(bounds)]


def _merge(group: Sequence[BatchDensity]) -> BatchDensity:
    total_s = sum(batch.duration_s for batch in group) or 1.0

    def mean(value: Callable[[BatchDensity], float]) -> float:
        return sum(value(batch) * batch.duration_s for batch in group) / total_s

    planned = [batch.planned_density for batch in group if batch.planned_density is not None]
    has_what_if = all(batch.what_if_compute_s is not None for batch in group)
    return BatchDensity(
        first_batch=group[0].first_batch,
        last_batch=group[-1].last_batch,
        started_s=group[0].started_s,
        duration_s=sum(batch.duration_s for batch in group),
        num_prefill_tokens=sum(batch.num_prefill_tokens for batch in group),
        num_cached_tokens=sum(batch.num_cached_tokens for batch in group),
        num_decode_tokens=sum(batch.num_decode_tokens for batch in group),
        compute_s=sum(batch.compute_s for batch in group),
        memory_s=sum(batch.memory_s for batch in group),
        what_if_compute_s=sum(batch.what_if_compute_s or 0.0 for batch in group) if has_what_if else None,
        what_if_memory_s=sum(batch.what_if_memory_s or 0.0 for batch in group) if has_what_if else None,
        planned_density=sum(planned) / len(planned) if planned else None,
        kv_usage=mean(lambda batch: batch.kv_usage),
        num_running_left=mean(lambda batch: batch.num_running_left),
        num_running_right=mean(lambda batch: batch.num_running_right),
        num_preempted=sum(batch.num_preempted for batch in group),
    )


def _ratio(compute_s: float | None, memory_s: float | None) -> float | None:
    return compute_s / memory_s if compute_s is not None and memory_s else None
