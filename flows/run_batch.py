"""The Prefect flow of a batch job: every stage a task, progress while it runs, a summary at the end.

Prefect triggers, shows and schedules; the job's own tables decide. The stages are those of `flows.running`.

`from __future__ import annotations` must stay out of this module: Prefect could not build a deployed flow's
form.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import date
from functools import partial
from signal import Signals
from typing import Any
from uuid import UUID

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.futures import wait
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed
from pydantic import BaseModel, Field

from blend_core.errors import BlendError
from flows.dates import fill_text, local_date, utc_now
from flows.job_outcome import JobOutcome
from flows.job_parts import CatchUp
from flows.job_spec import BatchJobSpec
from flows.nights import (
    TroubledNight,
    create_night,
    is_overtaken,
    known_night,
    nights_to_catch_up,
    register,
    troubled_nights,
)
from flows.outage import Value, through_outages
from flows.progress_artifact import PrefectProgress, RunLogger
from flows.report import build_report
from flows.report_format import DENSITY_COLUMNS, density_headers, density_rows, report_markdown
from flows.run_lease import free_dead_run
from flows.running import create_job, run_stages
from flows.settings import load_settings
from flows.stages import JobContext
from flows.stopping import StopReason, StopSignal, stopped_by_signals
from flows.tables import cell_text
from flows.wiring import Endpoints, Wiring
from storage.database import Database
from storage.job_status import JobStatus


class NightlySchedule(BaseModel):
    """When a nightly job runs."""

    cron: str = Field(description="five cron fields, at most one time a day")
    timezone: str = Field("UTC", description="time zone of the schedule")


def run_name() -> str:
    """What the flow run is called: as its job, with the day filled in."""
    given = flow_run.get_parameters()
    job: BatchJobSpec = given["job"]
    return fill_text(job.name, given["logical_date"] or _today(given["schedule"]))


@flow(name="run-batch", flow_run_name=run_name, persist_result=False)
def run_batch(
    job: BatchJobSpec,
    job_id: str | None = None,
    logical_date: date | None = None,
    schedule: NightlySchedule | None = None,
) -> State[Any]:
    """Runs a batch job: ingest, plan, infer, export, report.

    A retry of this flow run continues the same job. Cancelling the flow run cancels the job and keeps its
    results; any other end of the process leaves the job to be continued.

    Args:
        job: What to run: a model, and S3 addresses or SQL queries or both.
        job_id: Leave it at None to make a new job. The id of a job that has not ended (`job_…`, from `blend
            status`) continues that one; `job` is not looked at then, but needs a source all the same.
        logical_date: The day that the job is about. None is the day of the scheduled start in the schedule's
            time zone; without a schedule today.
        schedule: Of a nightly job, leave it as it is: this run is one of its nights, and each night is run
            once.
    """
    logger = get_run_logger()
    run_id = str(flow_run.get_id())
    settings = load_settings()
    wiring = Wiring.from_settings(settings, Endpoints.from_settings(settings))
    stop = StopSignal()
    try:
        with stopped_by_signals(partial(_stop, run_id, stop)):
            run = _FlowRun(wiring, logger, stop)
            if job_id is None and schedule is not None:
                return _run_night(run, job, schedule, logical_date)
            key = f"prefect:{run_id}"
            chosen = job_id or run.asked(
                lambda: create_job(wiring, job, idempotency_key=key, logical_date=logical_date)
            )
            return run.run(chosen)
    finally:
        wiring.close()


class _FlowRun:
    """Jobs run by one flow run."""

    __slots__ = ("logger", "stop", "wiring")

    def __init__(self, wiring: Wiring, logger: RunLogger, stop: StopSignal) -> None:
        self.wiring = wiring
        self.logger = logger
        self.stop = stop

    def run(self, job_id: str) -> State[Any]:
        """Runs a job to its end, shows its report, and returns the state that it comes to."""
        self.logger.info("Job %s", job_id)
        progress = PrefectProgress(self.logger, time.monotonic)
        try:
            outcome = run_stages(
                self.wiring, job_id, progress, self.stop, _run_as_task, run_together=_run_as_tasks
            )
        finally:
            progress.end()
        if outcome.write_back_error is not None:
            self.logger.warning("Job %s: %s", job_id, _write_back_told(outcome))
        _show_report(self.wiring, job_id, self.logger)
        return _end_state(outcome)

    def asked(self, question: Callable[[], Value]) -> Value:
        """The answer of the database, also of one that is away for a while."""
        return through_outages(question, self.stop, self.logger.warning)


def _run_night(
    run: _FlowRun, job: BatchJobSpec, schedule: NightlySchedule, logical_date: date | None
) -> State[Any]:
    """Runs one night of a nightly job, behind the missed ones that it is to catch up with."""
    now = utc_now()
    database = run.wiring.database
    nightly = run.asked(lambda: register(run.wiring, job, schedule.cron, schedule.timezone))
    day = logical_date or _today(schedule)
    if logical_date is None and job.catch_up is not CatchUp.ALL and is_overtaken(nightly, day, now):
        message = f"Night {day} comes too late, a later one is due; `blend status` tells how to run it."
        return Completed(name="Skipped", message=message)
    troubled = run.asked(lambda: troubled_nights(database, nightly, now))
    for night in troubled:
        if night.logical_date < day:
            run.logger.warning("%s", night.sentence(job.name))
    for night in nights_to_catch_up(troubled, job.catch_up, day):
        _catch_up(run, job, night)
    running_id = run.asked(lambda: _running_job_id(database, job, day))
    # A retry of this flow run follows its own dead run, whose lease may still be live.
    is_retry = flow_run.get_run_count() > 1
    if running_id is not None and not is_retry:
        return Completed(name="Skipped", message=f"Night {day} is run already, as job {running_id}.")
    job_id, _ = run.asked(lambda: create_night(run.wiring, job, day))
    return run.run(job_id)


def _running_job_id(database: Database, job: BatchJobSpec, day: date) -> str | None:
    """The job of a night that is being run; a run whose process died on this machine is none."""
    known = known_night(database, job, day)
    if known is None or not known.is_running or free_dead_run(database, known.job_id):
        return None
    return known.job_id


def _today(schedule: NightlySchedule | None) -> date:
    """The day that a flow run is about which was given none."""
    if schedule is None:
        return local_date(utc_now(), load_settings().nightly.timezone)
    return local_date(flow_run.get_scheduled_start_time(), schedule.timezone)


def _catch_up(run: _FlowRun, job: BatchJobSpec, night: TroubledNight) -> None:
    """Runs a missed or stuck night; what goes wrong with it does not hold up the night itself."""
    if run.stop.reason is not None:
        return
    try:
        job_id = night.job_id or run.asked(lambda: create_night(run.wiring, job, night.logical_date))[0]
        state = run.run(job_id)
        level = logging.INFO if state.is_completed() else logging.WARNING
        run.logger.log(level, "Caught up with night %s: %s", night.logical_date, state.message)
    except BlendError as error:
        run.logger.error("Night %s could not be caught up with: %s", night.logical_date, error)
    except Exception as error:
        run.logger.exception(
            "Night %s could not be caught up with: unexpected %s.", night.logical_date, type(error).__name__
        )


def _run_as_task(name: str, stage: Callable[[JobContext], str], context: JobContext) -> str:
    # What a stage has done is in the job's tables; a cached task would only hide that.
    @task(name=name, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)
    def run_stage() -> str:
        return stage(context)

    return run_stage()


def _run_as_tasks(works: Mapping[str, Callable[[], None]]) -> None:
    futures = [
        task(name=name, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)(work).submit()
        for name, work in works.items()
    ]
    wait(futures)
    for future in futures:
        future.result()


def _stop(flow_run_id: str, stop: StopSignal, number: Signals) -> None:
    """Stops the run after a signal; off the main thread, since asking Prefect may need the thread's own
    client.
    """

    def decide() -> None:
        is_cancelled = number is Signals.SIGINT or _is_cancelling(flow_run_id)
        stop.request(StopReason.CANCELLED if is_cancelled else StopReason.INTERRUPTED)

    threading.Thread(target=decide, name="stop", daemon=True).start()


def _is_cancelling(flow_run_id: str) -> bool:
    """Whether the user cancelled the flow run; Prefect ends its process by SIGTERM then, as others do,
    too.
    """
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(flow_run_id)).state
    except Exception:
        # A Prefect that does not answer cannot have asked for anything: the job stays to be continued.
        logging.getLogger(__name__).warning("Prefect did not say why the flow run is ended.", exc_info=True)
        return False
    return state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED)


def _end_state(outcome: JobOutcome) -> State[Any]:
    message = (
        f"Job {outcome.job_id} {outcome.status}: {outcome.succeeded:,} succeeded "
        f"+ {outcome.errored:,} errored + {outcome.expired:,} expired + {outcome.cancelled:,} cancelled "
        f"= {outcome.total:,}"
    )
    if outcome.write_back_error is not None:
        message += f"; {_write_back_told(outcome)}"
    if outcome.status == JobStatus.COMPLETED:
        return Completed(message=message)
    return Cancelled(message=message) if outcome.status == JobStatus.CANCELLED else Failed(message=message)


def _write_back_told(outcome: JobOutcome) -> str:
    return (
        f"not every result was written back: {outcome.write_back_error} `blend write-back {outcome.job_id}` "
        "does it again."
    )


def _show_report(wiring: Wiring, job_id: str, logger: RunLogger) -> None:
    """Shows what the job did. The job has ended: a service that does not answer now does not fail the run."""
    try:
        report = build_report(wiring.database, job_id)
        create_markdown_artifact(
            report_markdown(report), key="summary", description=f"Job {job_id} {report.status}"
        )
        headers = density_headers(report)
        create_table_artifact(
            [dict(zip(headers, map(cell_text, row), strict=True)) for row in density_rows(report)],
            key="density",
            description=f"Compute density of the batches of job {job_id}. {DENSITY_COLUMNS}",
        )
    except Exception as error:
        logger.warning(
            "The report cannot be shown here (%s); see `blend report %s`.", type(error).__name__, job_id
        )
