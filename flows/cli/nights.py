"""`blend backfill`, `blend watermark`, `blend write-back`: nights not run, what they read and write."""

import sys
from functools import partial
from pathlib import Path
from traceback import format_exc
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blend_core.errors import BlendError, ConfigurationError
from flows.cli.output import Json, print_json, print_line, print_table, tell

if TYPE_CHECKING:
    from datetime import date

    from flows.job_spec import BatchJobSpec
    from flows.stopping import StopSignal
    from flows.wiring import Wiring
    from storage.nights import Nightly

# In place of the status of a night's job: there is none, or it could not be asked for.
_NOT_BEGUN = "not_begun"
_UNKNOWN = "unknown"

group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(backfill)
    app.command("write-back")(write_back)
    app.add_typer(group, name="watermark", help="Show or reset what jobs have read already.")


def backfill(
    nightly: Annotated[
        str, typer.Argument(metavar="NAME|JOB.yaml", help="A nightly job by its name, or a job file.")
    ],
    first: Annotated[str, typer.Option("--from", metavar="DAY", help="First logical date, 2026-11-01.")],
    last: Annotated[str, typer.Option("--to", metavar="DAY", help="Last logical date, included.")],
    json: Json = False,
) -> None:
    """Run a job for each day of a range, one by one.

    One job for each logical date: of a nightly job those of its schedule, of a job file every day. A day's
    job is made, and its completion window begins, when its turn comes. Doing it again does nothing for a day
    that is done, continues one that was stopped, and makes a new job for one that failed, expired or was
    cancelled. A day that fails does not hold up the next. Ctrl-C cancels the day that runs, SIGTERM leaves it
    to be continued, and neither begins another.

    \b
    Examples:
      blend backfill tickets --from 2026-11-01 --to 2026-11-07
      blend backfill night.yaml --from 2026-11-01 --to 2026-11-07 --json
    """
    from flows.cli.services import brought_up
    from flows.dates import parse_date, utc_now
    from flows.job_spec import dated
    from flows.nights import backfill_dates
    from flows.preflight import check_job
    from flows.stopping import stop_at_signals

    start, end = parse_date(first, "--from"), parse_date(last, "--to")
    from_file = _job_of_file(nightly)
    with brought_up() as wiring:
        spec, known = (from_file, None) if from_file is not None else _job_of_name(wiring, nightly)
        zone = wiring.settings.nightly.timezone if known is None else known.timezone
        days = backfill_dates(known, start, end, utc_now(), zone)
        check_job(wiring, dated(spec, days[0]))
        with stop_at_signals(ends_process=True) as stop:
            outcomes = [_run_night(wiring, spec, day, stop) for day in days]
    if stop.reason is not None and any(_is_left(night) for night in outcomes):
        tell("The backfill was stopped; the same command runs what is left.")
    if json:
        print_json({"name": spec.name, "nights": outcomes})
    else:
        print_table(
            ("day", "job", "status", "succeeded", "total", ""),
            [
                (
                    night["logical_date"], night["job_id"] or "", night["status"], night["succeeded"],
                    night["total"], night["error"] or _remark(night),
                )
                for night in outcomes
            ],
        )  # fmt: skip
    if any(night["status"] != "completed" or night["error"] for night in outcomes):
        raise typer.Exit(1)


def _run_night(wiring: "Wiring", spec: "BatchJobSpec", day: "date", stop: "StopSignal") -> dict[str, Any]:
    """Makes a night's job and runs it. It is made when its turn comes: its completion window begins then.

    What goes wrong with a night is told in its row and holds up no other.
    """
    night = _night_of(day)
    try:
        _make_and_run(wiring, spec, day, stop, night)
    except BlendError as error:
        night["error"] = str(error)
    except Exception as error:
        tell(f"night {day}: {format_exc()}")
        night["error"] = f"unexpected {type(error).__name__}: {error}"
    return night


def _make_and_run(
    wiring: "Wiring", spec: "BatchJobSpec", day: "date", stop: "StopSignal", night: dict[str, Any]
) -> None:
    import time

    from flows.job_outcome import job_outcome
    from flows.nights import create_night, known_night
    from flows.outage import through_outages
    from flows.progress import shown_progress
    from flows.running import run_job
    from storage.jobs import get_job

    asked = partial(through_outages, stop=stop, note=tell)
    if stop.reason is not None:
        known = asked(lambda: known_night(wiring.database, spec, day))
        if known is None or known.is_to_be_repeated:
            return
    job_id, night["is_new"] = asked(lambda: create_night(wiring, spec, day, again=True))
    night["job_id"], night["status"] = job_id, _UNKNOWN
    try:
        if stop.reason is None and not asked(lambda: get_job(wiring.database, job_id)).status.is_end:
            tell(f"night {day}: job {job_id}")
            with shown_progress(sys.stderr, time.monotonic) as progress:
                run_job(wiring, job_id, progress, stop)
    finally:
        outcome = asked(lambda: job_outcome(wiring.database, job_id, duration_s=0.0))
        night["status"] = outcome.status
        night["succeeded"], night["total"] = outcome.succeeded, outcome.total
        night["error"] = outcome.error_message or outcome.write_back_error


def _night_of(day: "date") -> dict[str, Any]:
    return {
        "logical_date": day.isoformat(),
        "job_id": None,
        "is_new": False,
        "status": _NOT_BEGUN,
        "succeeded": 0,
        "total": 0,
        "error": None,
    }


def _is_left(night: dict[str, Any]) -> bool:
    """Whether the same command would go on with the night."""
    from storage.job_status import JobStatus

    return night["status"] in (_NOT_BEGUN, _UNKNOWN) or not JobStatus(night["status"]).is_end


def _remark(night: dict[str, Any]) -> str:
    return "" if night["is_new"] or night["job_id"] is None else "was there"


def _job_of_file(nightly: str) -> "BatchJobSpec | None":
    from flows.nights import night_job

    if not nightly.endswith((".yaml", ".yml", ".json")) and not Path(nightly).is_file():
        return None
    return night_job(Path(nightly))


def _job_of_name(wiring: "Wiring", name: str) -> "tuple[BatchJobSpec, Nightly]":
    from flows.job_spec import parse_job
    from storage.nights import list_nightlies

    nightlies = {nightly.name: nightly for nightly in list_nightlies(wiring.database)}
    found = nightlies.get(name)
    if found is None:
        known = ", ".join(nightlies) or "none"
        raise ConfigurationError(
            f"There is no nightly job {name!r} (known: {known}); name one that `blend up` serves, or a "
            "job file."
        )
    return parse_job(found.spec, origin=f"nightly job {name}"), found


def write_back(
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="Id of a job that has ended.")],
    json: Json = False,
) -> None:
    """Write a job's results into your table again.

    For a job with `write_back` whose table could not be written, or refused rows. Rows that are there already
    stay as they are.

    \b
    Example:
      blend write-back job_01m8kzrqrsafg01r9jwt
    """
    from flows.cli.services import connected
    from flows.job_spec import dated, parse_job
    from flows.write_back import check_write_back, write_back_results
    from storage.jobs import get_job

    with connected() as wiring:
        job = get_job(wiring.database, job_id)
        spec = dated(parse_job(job.spec, origin=f"Job {job_id}"), job.logical_date)
        if spec.write_back is None:
            raise ConfigurationError(f"Job {job_id} has no `write_back`; `blend results` prints its answers.")
        if not job.status.is_end:
            raise ConfigurationError(
                f"Job {job_id} is {job.status}; it writes back at its end, `blend run --job-id {job_id}`."
            )
        check_write_back(wiring, spec)
        outcome = write_back_results(wiring, spec, job_id)
    if json:
        print_json({"job_id": job_id, **outcome})
    else:
        print_line(
            f"{outcome['num_written']:,} results in {spec.write_back.table}, "
            f"{outcome['num_refused']:,} refused, {outcome['num_dropped']:,} dropped by a trigger, "
            f"{outcome['num_without_key']:,} requests without a key of their own"
        )
        if outcome["error"] is not None:
            print_line(outcome["error"])
    if outcome["error"] is not None:
        raise typer.Exit(1)


@group.command()
def show(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of a job; by default every one.")
    ] = None,
    json: Json = False,
) -> None:
    """Tell how far jobs have read their sources.

    \b
    Example:
      blend watermark show tickets
    """
    from flows.cli.services import connected_database
    from storage.readings import known_sources

    with connected_database() as database:
        sources = known_sources(database, name)
    if json:
        print_json(
            {
                "sources": [
                    {
                        "name": source.job_name,
                        "source": source.source,
                        "watermark": source.watermark,
                        "num_read": source.num_read,
                        "job_id": source.job_id,
                        "read_at": source.read_at.isoformat(),
                    }
                    for source in sources
                ]
            }
        )
    elif not sources:
        print_line(
            "Nothing is remembered; jobs with `watermark_column` or `s3_only_new` remember what they read."
        )
    else:
        print_table(
            ("name", "source", "watermark", "read", "last job", "at"),
            [
                (
                    source.job_name, source.source, source.watermark or "", source.num_read, source.job_id,
                    f"{source.read_at:%Y-%m-%d %H:%M:%S}",
                )
                for source in sources
            ],
        )  # fmt: skip


@group.command()
def reset(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the job.")],
    source: Annotated[
        str | None,
        typer.Option("--source", help="One source, as `blend watermark show` names it; by default all."),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="VALUE", help="Set the query's watermark; by default it is forgotten."),
    ] = None,
    json: Json = False,
) -> None:
    """Forget what jobs of a name have read.

    The next job of the name reads everything again; with --to, rows of that value and later.

    \b
    Examples:
      blend watermark reset tickets
      blend watermark reset tickets --source shop:updated_at --to 2026-11-01
    """
    from flows.cli.services import connected_database
    from storage.readings import reset_readings

    with connected_database() as database:
        number = reset_readings(database, name, source, to)
    if json:
        print_json({"name": name, "num_sources": number, "watermark": to})
    else:
        print_line(f"{number} source{'' if number == 1 else 's'} of {name} reset.")
