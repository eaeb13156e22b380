"""Runs a job to its end: every stage in turn, in this process, with Prefect neither needed nor asked.

The Prefect flow runs the very same stages; it only puts each of them into a task.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import date
from functools import partial

from blend_core.errors import ConfigurationError, StorageError
from flows.dates import local_date, utc_now
from flows.furthest import FurthestProgress
from flows.job_outcome import JobOutcome, job_outcome
from flows.job_spec import BatchJobSpec, dated, parse_job
from flows.outage import through_outages
from flows.progress import Progress
from flows.run_lease import free_dead_run, held_job, take_job
from flows.stage_order import StageRunner, run_in_order
from flows.stages import JobContext
from flows.stages.context import RunTogether, run_in_threads
from flows.stopping import StopReason, StopSignal, stop_at_signals
from flows.wiring import Wiring
from storage import jobs
from storage.job_status import JobStatus
from storage.jobs import get_job, request_cancel


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
    asked = partial(through_outages, stop=stop, note=progress.note)
    job = asked(lambda: get_job(database, job_id))
    if job.status.is_end:
        # One that died when its job had just ended.
        asked(lambda: free_dead_run(database, job_id))
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
        try:
            run = asked(take)
        except StorageError:
            # The run that was waited for may have brought the job to its end.
            outcome = job_outcome(database, job_id, time.monotonic() - started_s)
            if not JobStatus(outcome.status).is_end:
                raise
            return outcome
        furthest = FurthestProgress(progress)
        context = JobContext(wiring, spec, run, stop, furthest, run_together)
        with held_job(database, run, stop):
            # Every stage begins with what the database knows to be done, as the next run of the job would.
            through_outages(
                lambda: run_in_order(context, run_stage),
                stop,
                progress.note,
                how_far=lambda: furthest.num_advances,
            )
    return asked(lambda: job_outcome(database, job_id, time.monotonic() - started_s))
