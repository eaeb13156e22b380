"""`blend status`: services and jobs as they stand."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.job_standing import (
    deaths_line,
    holder_json,
    holder_line,
    stopped_lines,
    stopped_list,
    unbegun_line,
    waiting_line,
)
from flows.cli.output import Json, print_json, print_line, print_table

if TYPE_CHECKING:
    from pathlib import Path

    from flows.settings import Settings
    from flows.wiring import Wiring
    from storage.database import Database
    from storage.jobs import Job
    from storage.lost_runs import StoppedJob
    from storage.results import Counts

NUM_RECENT_JOBS = 10


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(status)


def status(
    job_id: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Id of a job; without it services and recent jobs.")
    ] = None,
    json: Json = False,
) -> None:
    """Show services and jobs, or one job.

    \b
    Examples:
      blend status
      blend status job_01m8kzrqrsafg01r9jwt --json
    """
    if job_id is None:
        _status_of_all(json=json)
    else:
        _status_of_one(job_id, json=json)


def _status_of_all(*, json: bool) -> None:
    from blend_core.errors import BlendError
    from flows.cli.services import connected, local_stack
    from flows.settings import load_settings
    from storage.jobs import list_jobs
    from storage.lost_runs import StoppedJob

    settings = load_settings()
    stack = local_stack(settings)
    services, state = stack.status(), stack.state()
    jobs: list[Job] | None = None
    nights: list[dict[str, Any]] = []
    stopped: list[StoppedJob] = []
    try:
        with connected(settings) as wiring:
            jobs = list_jobs(wiring.database, limit=NUM_RECENT_JOBS)
            nights = _troubled_nights(wiring.database)
            told = {night["job_id"] for night in nights}
            stopped = [job for job in _jobs_left(wiring) if job.job_id not in told]
    except BlendError as error:
        reason = str(error)
    if json:
        print_json(
            {
                "home": str(stack.home),
                "s3": None
                if state is None
                else {
                    "endpoint_url": state.s3_endpoint_url,
                    "bucket": state.s3_bucket,
                    "keys": _place_of_keys(settings, stack.home),
                },
                "services": [
                    {"name": entry.name, "state": entry.state, "pid": entry.pid, "url": entry.url}
                    for entry in services
                ],
                "jobs": None if jobs is None else [_job_json(job) for job in jobs],
                "troubled_nights": nights,
                "stopped_jobs": [job.job_id for job in stopped],
            }
        )
        return
    print_table(
        ("service", "state", "pid", "address"),
        [(entry.name, entry.state, _text(entry.pid), entry.url or "") for entry in services],
    )
    print_line(f"state folder: {stack.home}")
    print_line(f"S3 keys: {_place_of_keys(settings, stack.home)}; `blend upload` needs none")
    print_line("")
    if jobs is None:
        print_line(reason)
    elif not jobs:
        print_line("No job yet; try `blend demo`.")
    else:
        print_table(
            ("job", "name", "day", "status", "created", "succeeded", "errored", "total"),
            [
                (
                    job.job_id,
                    job.name,
                    job.logical_date,
                    job.status,
                    f"{job.created_at:%Y-%m-%d %H:%M:%S}",
                    job.num_succeeded,
                    job.num_errored,
                    job.num_total,
                )
                for job in jobs
            ],
        )
    for night in nights:
        print_line(night["message"])
    for line in stopped_list(stopped, NUM_RECENT_JOBS):
        print_line(line)


def _jobs_left(wiring: "Wiring", job_id: str | None = None) -> "list[StoppedJob]":
    """Jobs, or that one, that have not ended, that nothing runs and that nothing is going to run."""
    from flows.prefect_queue import queued_jobs
    from storage.lost_runs import stopped_jobs, unbegun_jobs

    stopped, unbegun = (
        [job for job in jobs if job_id in (None, job.job_id)]
        for jobs in (stopped_jobs(wiring.database), unbegun_jobs(wiring.database))
    )
    queued = queued_jobs(wiring.endpoints.prefect_api_url) if unbegun else None
    if queued is not None:
        stopped += [job for job in unbegun if job.job_id not in queued]
    return stopped


def _troubled_nights(database: "Database") -> list[dict[str, Any]]:
    """Missed and stuck nights of every nightly job, the newest of each."""
    from storage.nights import list_nightlies

    nightlies = list_nightlies(database)
    if not nightlies:
        return []
    from flows.dates import utc_now
    from flows.nights import troubled_nights

    return [
        {
            "name": nightly.name,
            "logical_date": night.logical_date.isoformat(),
            "state": night.state.value,
            "job_id": night.job_id,
            "message": night.sentence(nightly.name),
        }
        for nightly in nightlies
        for night in troubled_nights(database, nightly, utc_now())[-NUM_RECENT_JOBS:]
    ]


def _status_of_one(job_id: str, *, json: bool) -> None:
    from flows.cli.services import connected
    from storage.jobs import get_job
    from storage.lost_runs import live_run
    from storage.results import counts, job_metrics
    from storage.runs import RunStatus, latest_run
    from storage.suspects import engine_deaths

    with connected() as wiring:
        job = get_job(wiring.database, job_id)
        tally = counts(wiring.database, job_id)
        metrics = job_metrics(wiring.database, job_id)
        deaths = engine_deaths(wiring.database, job_id)
        latest = latest_run(wiring.database, job_id)
        live = None if job.status.is_end else live_run(wiring.database, job_id)
        is_stopped = not job.status.is_end and bool(_jobs_left(wiring, job_id))
    engine, policy = (None, None) if latest is None else (latest.engine, latest.policy)
    run_status = None if latest is None else latest.status
    run_error = None if latest is None or job.status.is_end else latest.error
    if json:
        print_json(
            _job_json(job)
            | _tally_json(tally)
            | {
                "engine": engine,
                "policy": policy,
                "tokens_per_s": metrics.tokens_per_s,
                "prefix_sharing": metrics.prefix_sharing,
                "latest_run_status": run_status,
                "latest_run_error": run_error,
                "is_stopped": is_stopped,
                "held_by": None if live is None else holder_json(live),
                "engine_deaths": [death.as_json() for death in deaths],
            }
        )
        return
    done = tally.total - tally.pending
    served = f"model {job.model}" + ("" if engine is None else f", engine {engine}, policy {policy}")
    print_line(f"Job {job.job_id} ({job.name}): {job.status}, {served}, day {job.logical_date}")
    print_line(
        f"{done:,} of {tally.total:,} done: {tally.succeeded:,} succeeded, {tally.errored:,} errored, "
        f"{tally.expired:,} expired, {tally.cancelled:,} cancelled"
    )
    if live is not None:
        print_line(holder_line(live))
        waiting = waiting_line(live)
        if waiting is not None:
            print_line(waiting)
    elif latest is None and not job.status.is_end and not is_stopped:
        print_line(unbegun_line())
    if metrics.tokens_per_s is not None:
        sharing = "-" if metrics.prefix_sharing is None else f"{metrics.prefix_sharing:.0%}"
        print_line(f"{metrics.tokens_per_s:,.0f} tokens/s, prefix sharing {sharing}")
    if deaths:
        print_line(deaths_line(deaths, run_error))
    if job.error_message:
        print_line(job.error_message)
    if job.write_back is not None:
        print_line(f"{job.write_back['num_written']:,} results written back")
        if job.write_back["error"] is not None:
            print_line(f"{job.write_back['error']} `blend write-back {job.job_id}` does it again.")
    if is_stopped and live is None:
        was_told_to_end = run_status is RunStatus.CANCELLED
        for line in stopped_lines(job.job_id, run_error, was_told_to_end=was_told_to_end):
            print_line(line)
    for uri in filter(None, (job.output_uri, job.error_uri, job.table_uri)):
        print_line(uri)


def _place_of_keys(settings: "Settings", home: "Path") -> str:
    if settings.object_store.endpoint_url is None:
        return f"s3_access_key and s3_secret_key in {home / 'stack.json'}"
    return "BLEND_OBJECT_STORE__ACCESS_KEY and …__SECRET_KEY, else the usual AWS credentials"


def _job_json(job: "Job") -> dict[str, Any]:
    return {
        "job_id": job.job_id,
        "name": job.name,
        "status": job.status,
        "model": job.model,
        "logical_date": job.logical_date.isoformat(),
        "nightly": job.nightly,
        "created_at": job.created_at.isoformat(),
        "finished_at": None if job.finished_at is None else job.finished_at.isoformat(),
        "total": job.num_total,
        "succeeded": job.num_succeeded,
        "errored": job.num_errored,
        "expired": job.num_expired,
        "cancelled": job.num_cancelled,
        "error_message": job.error_message,
        "output_uri": job.output_uri,
        "error_uri": job.error_uri,
        "table_uri": job.table_uri,
        "write_back": job.write_back,
    }


def _tally_json(tally: "Counts") -> dict[str, int]:
    return {
        "total": tally.total,
        "succeeded": tally.succeeded,
        "errored": tally.errored,
        "expired": tally.expired,
        "cancelled": tally.cancelled,
        "pending": tally.pending,
    }


def _text(value: object) -> str:
    return "" if value is None else str(value)
