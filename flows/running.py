"""Runs a job to its end: every stage in turn, in this process, with Prefect neither needed nor asked.

The Prefect flow runs the very same stages; it only puts each of them into a task.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import date
from functools import partial
from typing import Protocol

from blend_core.errors import (
    ConfigurationError,
    RunInterruptedError,
    SourceError,
    StaleRunError,
    StorageError,
)
from flows.dates import local_date, utc_now
from flows.furthest import FurthestProgress
from flows.job_outcome import JobOutcome, job_outcome
from flows.job_spec import BatchJobSpec, dated, parse_job
from flows.outage import through_outages
from flows.preflight import check_engine, check_table_to_write
from flows.progress import Progress
from flows.run_lease import LEASE_S, free_dead_run, held_job, take_job
from flows.stages import JobContext, export_job, infer_job, ingest_job, plan_job, report_job, write_back_job
from flows.stages.context import RunTogether, run_in_threads
from flows.stopping import StopReason, StopSignal, stop_at_signals
from flows.wiring import Wiring
from storage import jobs
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


def create_job(
    wiring: Wiring,
    spec: BatchJobSpec,
    idempotency_key: str | None = None,
    *,
    logical_date: date | None = None,
    nightly: str | None = None,
) -> str:
    """Writes a job down for a later run and returns its id; the same key and job again return the same id.

    Args:
        wiring: the parts of this process.
        spec: what to run.
        idempotency_key: names the job once and for all.
        logical_date: the day that the job is about; by default today in the configured time zone.
        nightly: the nightly job of which this is one night.

    Raises:
        ConfigurationError: the configured time zone is none, or the key is that of a job with other content
            or of another day.
        StorageError: the database refused.
    """
    day = logical_date or local_date(utc_now(), wiring.settings.nightly.timezone)
    job_id = jobs.create_job(
        wiring.database,
        name=dated(spec, day).name,
        model=spec.model,
        spec=spec.model_dump(mode="json"),
        completion_window_s=spec.completion_window_hours * 3600.0,
        idempotency_key=idempotency_key,
        logical_date=day,
        nightly=nightly,
    )
    # A night is its name and day, and keeps the job that it began with when the job file is edited.
    if idempotency_key is not None and nightly is None:
        _check_same_job(wiring, job_id, spec, idempotency_key, logical_date)
    return job_id


def _check_same_job(
    wiring: Wiring, job_id: str, spec: BatchJobSpec, idempotency_key: str, logical_date: date | None
) -> None:
    """Checks that the job of a key is the one that was asked for; without a day it may be that of any."""
    job = get_job(wiring.database, job_id)
    if logical_date is not None and job.logical_date != logical_date:
        raise ConfigurationError(
            f"Idempotency key {idempotency_key!r} belongs to job {job_id}, about {job.logical_date}; give "
            f"another key for {logical_date}, or continue that one with `blend run --job-id {job_id}`.",
            job_id=job_id,
        )
    if parse_job(job.spec, origin=f"Job {job_id}") != spec:
        raise ConfigurationError(
            f"Idempotency key {idempotency_key!r} belongs to job {job_id}, made with other content; "
            f"give another key, or continue that one with `blend run --job-id {job_id}`.",
            job_id=job_id,
        )


def run_job(wiring: Wiring, job_id: str, progress: Progress, stop: StopSignal | None = None) -> JobOutcome:
    """Runs an existing job to its end, or continues it where an earlier run stopped.

    Stages that are complete are not repeated and what has a result is never run twice. A job that has ended
    is left as it is.

    Args:
        wiring: the parts of this process.
        job_id: the job.
        progress: where to report to.
        stop: ends the run early. By default signals do while this runs in the main thread: SIGINT cancels the
            job (what has finished is kept and exported), SIGTERM leaves it to be continued, as machines send
            it that shut down, and a second one ends the process at once, and its engine with it.

    Raises:
        ConfigurationError: the job does not exist, or it cannot run as it was submitted; it is failed then.
        RunInterruptedError: SIGTERM came; run the job again to continue it.
        BlendError: the run failed; run the job again to continue it. A database or an object store that is
            away for less than `flows.outage.GIVE_UP_AFTER_S` fails no run.
    """
    with ExitStack() as signals:
        stop = stop or signals.enter_context(stop_at_signals())
        return run_stages(wiring, job_id, progress, stop, _call_stage)


def _call_stage(name: str, stage: Callable[[JobContext], str], context: JobContext) -> str:
    return stage(context)


def cancel_job(wiring: Wiring, job_id: str, progress: Progress) -> JobStatus:
    """Cancels a job and returns its state after that.

    A run that executes it somewhere sees that within seconds and ends the job; where nothing runs, the job is
    ended here, with what it has exported. A job that has ended stays as it is.

    Raises:
        StorageError: there is no such job.
    """
    status = request_cancel(wiring.database, job_id)
    if status is JobStatus.CANCELLING:
        stop = StopSignal()
        stop.request(StopReason.CANCELLED)
        try:
            run_stages(wiring, job_id, progress, stop, _call_stage, wait_for_lease=False)
        except StorageError as error:
            if "lease_left_s" not in error.ids:
                raise
    return get_job(wiring.database, job_id).status


def run_stages(
    wiring: Wiring,
    job_id: str,
    progress: Progress,
    stop: StopSignal,
    run_stage: StageRunner,
    *,
    run_together: RunTogether = run_in_threads,
    wait_for_lease: bool = True,
) -> JobOutcome:
    """Takes a job and runs its stages, each called through `run_stage`; see `run_job`.

    Args:
        wiring: the parts of this process.
        job_id: the job.
        progress: where to report to.
        stop: ends the run early. It stays as it is: what the run learns of its job, that it is cancelled,
            expired or lost, ends this job alone.
        run_stage: calls a stage.
        run_together: calls the ranks of a job that has several.
        wait_for_lease: wait for the lease of a run that died; else raise `StorageError` at once.
    """
    started_s = time.monotonic()
    database = wiring.database
    stop = StopSignal(stop)
    job = through_outages(lambda: get_job(database, job_id), stop, progress.note)
    if job.status.is_end:
        # One that died when its job had just ended.
        through_outages(lambda: free_dead_run(database, job_id), stop, progress.note)
    else:
        spec = dated(parse_job(job.spec, origin=f"Job {job_id}"), job.logical_date)
        take = partial(
            take_job,
            database,
            job_id,
            engine=wiring.engine_name(spec),
            policy=spec.options.policy.value,
            progress=progress,
            stop=stop,
            wait_for_lease=wait_for_lease,
        )
        run = through_outages(take, stop, progress.note)
        furthest = FurthestProgress(progress)
        context = JobContext(wiring, spec, run, stop, furthest, run_together)
        with held_job(database, run, stop):
            # Every stage begins with what the database knows to be done, as the next run of the job would.
            through_outages(
                lambda: _run_stages(context, run_stage),
                stop,
                progress.note,
                how_far=lambda: furthest.num_advances,
            )
    return through_outages(
        lambda: job_outcome(wiring.database, job_id, time.monotonic() - started_s), stop, progress.note
    )


def _run_stages(context: JobContext, run_stage: StageRunner) -> None:
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
