"""Shows a job that another process runs, from what the database says about it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from blend_core.engines.base import StepWindow
from blend_core.wording import count_text, duration_text
from flows.progress import Progress
from storage.database import Database
from storage.job_status import JobStatus
from storage.jobs import get_job
from storage.plans import load_plan_summary, next_revision
from storage.results import DensityRow, counts, densities
from storage.runs import latest_run_id

POLL_S = 0.5

_STAGE_WORK = {
    "ingest": "reads and checks the sources",
    "plan": "orders the requests",
    "infer": "runs the model",
    "export": "writes output objects",
}
_STAGES = tuple(_STAGE_WORK)


@dataclass(frozen=True, slots=True)
class _Standing:
    stage: str | None
    run_id: str | None


def follow_job(
    database: Database, job_id: str, progress: Progress, is_running: Callable[[], bool]
) -> JobStatus:
    """Reports a job's stages, counts and windows until it has ended or nobody runs it any more.

    Args:
        database: the platform's tables.
        job_id: the job.
        progress: where to report to.
        is_running: whether the process that runs the job is alive.

    Returns:
        The job's state; no end state where its process ended early.
    """
    stage: str | None = None
    num_windows = 0
    while True:
        alive = is_running()
        job = get_job(database, job_id)
        standing = _standing(database, job_id, job.status, is_ingested=job.ingested_at is not None)
        if standing.stage != stage:
            _move(database, job_id, progress, stage, standing.stage)
            stage = standing.stage
        if stage == "infer" and standing.run_id is not None:
            windows = densities(database, standing.run_id)
            for window in windows[num_windows:]:
                progress.window(_step_window(window), window.rank)
            num_windows = len(windows)
        if stage == "infer":
            tally = counts(database, job_id)
            progress.counted(tally.total - tally.pending, tally.total)
        if job.status.is_end or not alive:
            return job.status
        time.sleep(POLL_S)


def _standing(database: Database, job_id: str, status: JobStatus, *, is_ingested: bool) -> _Standing:
    if status.is_end:
        return _Standing(None, None)
    if status is JobStatus.FINALIZING:
        return _Standing("export", None)
    if not is_ingested:
        return _Standing("ingest", None)
    has_plan = next_revision(database, job_id) > 0
    return _Standing("infer" if has_plan else "plan", latest_run_id(database, job_id))


def _move(database: Database, job_id: str, progress: Progress, old: str | None, new: str | None) -> None:
    """Ends the old stage, and those that went by between two looks."""
    first = 0 if old is None else _STAGES.index(old)
    last = len(_STAGES) if new is None else _STAGES.index(new)
    for stage in _STAGES[first:last]:
        if stage != old:
            progress.stage_started(stage, _STAGE_WORK[stage])
        progress.stage_finished(stage, _outcome(database, job_id, stage))
    if new is not None:
        progress.stage_started(new, _STAGE_WORK[new])


def _outcome(database: Database, job_id: str, stage: str) -> str:
    """What a stage that has ended came to, in one line."""
    if stage == "plan":
        return _plan_outcome(database, job_id)
    tally = counts(database, job_id)
    if stage == "ingest":
        return f"{count_text(tally.total, 'request')}, {tally.errored:,} of them bad"
    if stage == "infer":
        return f"{tally.succeeded:,} succeeded, {tally.errored:,} errored"
    return "answers and errors are in S3"


def _plan_outcome(database: Database, job_id: str) -> str:
    summary = load_plan_summary(database, job_id, revision=0)
    if summary is None:
        return "nothing to run"
    duration = (
        ""
        if summary.estimated_duration_s is None
        else f", about {duration_text(summary.estimated_duration_s)}"
    )
    return (
        f"{count_text(summary.num_requests, 'request')}{duration}, density {summary.density:.2f}, "
        f"prefix sharing {summary.prefix_sharing_planned:.0%} of at best {summary.prefix_sharing_best:.0%}"
    )


def _step_window(row: DensityRow) -> StepWindow:
    return StepWindow(
        batch_index=row.batch_index,
        revision=row.revision,
        started_at=row.started_at.timestamp(),
        duration_s=row.duration_s,
        predicted_s=row.predicted_s,
        num_steps=row.num_steps,
        num_prefill_tokens=row.num_prefill_tokens,
        num_decode_tokens=row.num_decode_tokens,
        num_cached_tokens=row.num_cached_tokens,
        num_recomputed_tokens=row.num_recomputed_tokens,
        prefill_tokens_sq=row.prefill_tokens_sq,
        decode_kv_tokens=row.decode_kv_tokens,
        compute_s=row.compute_s,
        memory_s=row.memory_s,
        kv_usage=row.kv_usage,
        num_running_left=row.num_running_left,
        num_running_right=row.num_running_right,
        num_preempted=row.num_preempted,
        num_finished=row.num_finished,
    )
