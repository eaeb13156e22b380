"""The stages of a job in their order, and the end state that they bring it to."""

from collections.abc import Callable
from typing import Protocol

from blend_core.errors import (
    ConfigurationError,
    RunInterruptedError,
    SourceError,
    StaleRunError,
    StorageError,
)
from flows.preflight import check_engine, check_table_to_write
from flows.run_lease import LEASE_S
from flows.stages import JobContext, export_job, infer_job, ingest_job, plan_job, report_job, write_back_job
from flows.stopping import StopReason
from storage.job_status import JobStatus
from storage.jobs import close_pending, get_job, request_cancel, set_job_status
from storage.output_lengths import remember_output_lengths
from storage.ownership import stale_run
from storage.results import counts
from storage.runs import heartbeat


class StageRunner(Protocol):
    """How a stage is called: directly, or as a Prefect task."""

    def __call__(self, name: str, stage: Callable[[JobContext], str], context: JobContext) -> str:
        """Calls `stage(context)` and returns what it returns; its errors pass through."""


def run_in_order(context: JobContext, run_stage: StageRunner) -> None:
    """Runs what the database does not know to be done, settles the job and exports; safe to repeat.

    Raises:
        StaleRunError: another run took the job over; nothing more is written.
        RunInterruptedError: the process was told to end; what is pending stays pending.
        BlendError: a stage failed; what it committed stays.
    """
    if not get_job(context.wiring.database, context.job_id).status.is_end:
        _run_to_end(context, run_stage)
    _run_stage("report", "reconciles the counts", report_job, context, run_stage)


def _run_to_end(context: JobContext, run_stage: StageRunner) -> None:
    database, job_id = context.wiring.database, context.job_id
    _ingest(context, run_stage)
    has_work = context.stop.reason is None and counts(database, job_id).pending > 0
    if has_work and _advance(context, JobStatus.IN_PROGRESS):
        _run_stage("plan", "orders the requests", plan_job, context, run_stage)
        if context.stop.reason is None:
            _run_stage("infer", f"runs {context.spec.model}", infer_job, context, run_stage)
    end = _settle(context)
    if end is JobStatus.COMPLETED:
        # Not of a job that was cut off: the answers that come first are the short ones.
        remember_output_lengths(database, context.run)
    _run_stage("export", "writes output objects", export_job, context, run_stage)
    if context.spec.write_back is not None:
        _run_stage("write back", "upserts results into your table", write_back_job, context, run_stage)
    set_job_status(database, job_id, end, run=context.run)


def _run_stage(
    name: str,
    detail: str,
    stage: Callable[[JobContext], str],
    context: JobContext,
    run_stage: StageRunner,
) -> None:
    context.progress.stage_started(name, detail)
    context.progress.stage_finished(name, run_stage(name, stage, context))


def _ingest(context: JobContext, run_stage: StageRunner) -> None:
    """Reads the sources unless an earlier run has; a job that cannot run as it was submitted is failed."""
    database, job_id = context.wiring.database, context.job_id
    job = get_job(database, job_id)
    if job.status is JobStatus.CANCELLING:
        context.stop.request(StopReason.CANCELLED)
    if context.stop.reason is not None:
        return
    try:
        # A job that has all its results is exported without its model.
        if job.ingested_at is None or counts(database, job_id).pending > 0:
            check_engine(context.wiring, context.spec)
        if job.ingested_at is None:
            check_table_to_write(context.wiring, context.spec, context.progress.note)
            _run_stage("ingest", "reads and checks the sources", ingest_job, context, run_stage)
    except (ConfigurationError, SourceError) as error:
        # A job that has been read may have answers: it waits for a right configuration.
        if not error.retryable and job.ingested_at is None:
            set_job_status(database, job_id, JobStatus.FAILED, run=context.run, error_message=str(error))
        raise


def _settle(context: JobContext) -> JobStatus:
    """Gives every request a result and returns the end state that the job is on its way to.

    Raises:
        StaleRunError: another run took the job over; nothing more is written.
        RunInterruptedError: the process was told to end; what is pending stays pending.
        StorageError: the sources were never read, so there is nothing that could be complete.
    """
    database, job_id = context.wiring.database, context.job_id
    # Asked right now, since a process that was stopped for a while may have lost its job without noticing.
    heartbeat(database, context.run, lease_s=LEASE_S)
    reason = context.stop.reason
    if reason is StopReason.LOST:
        raise stale_run(context.run)
    if reason is StopReason.INTERRUPTED:
        raise RunInterruptedError(
            f"The process was told to end; job {job_id} keeps its results; run it again to continue it.",
            job_id=job_id,
        )
    if reason is None and get_job(database, job_id).ingested_at is None:
        raise StorageError(
            f"The sources of job {job_id} were never read, so it is not complete; run it again.",
            job_id=job_id,
        )
    if reason is StopReason.CANCELLED:
        request_cancel(database, job_id)
    elif _advance(context, JobStatus.FINALIZING):
        if reason is StopReason.EXPIRED and _is_cut_off(context):
            return JobStatus.EXPIRED
        return JobStatus.COMPLETED
    close_pending(database, job_id, JobStatus.CANCELLED, run=context.run)
    return JobStatus.CANCELLED


def _is_cut_off(context: JobContext) -> bool:
    """Closes what a completion window that is over has left; whether it left anything.

    A job of which every request has its result by then is complete, however long its export takes.
    """
    database, job_id = context.wiring.database, context.job_id
    close_pending(database, job_id, JobStatus.EXPIRED, run=context.run)
    job = get_job(database, job_id)
    return job.num_expired > 0 or job.ingested_at is None


def _advance(context: JobContext, status: JobStatus) -> bool:
    """Moves the job on and returns whether it could: a job that was cancelled meanwhile stops the run."""
    database, job_id = context.wiring.database, context.job_id
    try:
        set_job_status(database, job_id, status, run=context.run)
    except StaleRunError:
        raise
    except StorageError:
        if get_job(database, job_id).status is not JobStatus.CANCELLING:
            raise
        context.stop.request(StopReason.CANCELLED)
        return False
    return True
