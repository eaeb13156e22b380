"""`blend up` and `blend down`: the embedded services of this machine."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from blend_core.errors import ConfigurationError
from flows.cli.output import Json, print_json, print_line, tell

if TYPE_CHECKING:
    from flows.wiring import Wiring
    from infra.supervisor import LocalStack


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(up)
    app.command()(down)


def up(
    json: Json = False,
) -> None:
    """Start the services of this machine.

    Starts Postgres, an S3 server and Prefect, and serves the deployments `ad-hoc` and `nightly`.

    Starts only what is missing; a service whose URL is in the environment is the user's own and left alone.
    Brings the tables up to date. Everything goes on running after the command; `blend down` stops it.

    Submitted and nightly jobs run in the environment of this command and, where that says nothing, by the
    file blend.env in the state folder as it is when they start; it holds lines such as
    BLEND_NIGHTLY__JOB=/srv/night/tickets.yaml. After a change run it again; while a job runs there, a changed
    setting is refused.

    \b
    Example:
      blend up
    """
    from flows.cli.services import brought_up, local_stack
    from flows.dates import utc_now
    from flows.nights import check_nightly, next_night
    from flows.settings import load_settings, settings_file

    settings = load_settings()
    nightly = settings.nightly
    check_nightly(settings)
    with brought_up(settings) as wiring:
        stack = local_stack(settings)
        _refuse_to_interrupt(wiring, stack)
        ending = _tell_what_ends(wiring)
        stack.up(tell, serve=True)
        services = stack.status()
        ui_url = prefect_ui_url(wiring.endpoints.prefect_api_url)
    next_at = next_night(nightly, utc_now())
    if json:
        print_json(
            {
                "services": [
                    {"name": entry.name, "state": entry.state, "url": entry.url} for entry in services
                ],
                "prefect_ui_url": ui_url,
                "nightly_job": None if nightly.job is None else str(nightly.job),
                "nights_unscheduled": ending,
                "next_night_at": None if next_at is None else next_at.isoformat(),
                "home": str(stack.home),
            }
        )
        return
    for entry in services:
        print_line(f"{entry.name:<10} {entry.state:<10} {entry.url or ''}".rstrip())
    if ui_url is not None:
        print_line(f"Prefect pages: {ui_url}")
    print_line(_nightly_text(nightly.job, next_at))
    print_line(f"State folder: {stack.home} (BLEND_HOME; .blend in the current folder if unset)")
    print_line(f"Settings: the environment, then {settings_file(stack.home)}")


def _refuse_to_interrupt(wiring: "Wiring", stack: "LocalStack") -> None:
    """Refuses where a job runs under the serving process that is about to be started anew."""
    from flows.lease_holder import holder_pid
    from storage.lost_runs import live_runs

    holders = {holder_pid(run.details): run.job_id for run in live_runs(wiring.database)}
    ended = stack.ended_by_up(pid for pid in holders if pid is not None)
    if ended:
        job_id = holders[ended[0]]
        raise ConfigurationError(
            f"Settings changed, and the serving process that is to be started anew runs job {job_id}. Wait "
            f"for its end (`blend status {job_id}`) and run `blend up` again; or run `blend down` first, "
            "which interrupts the job and keeps its results, then `blend up` and "
            f"`blend submit --job-id {job_id}`.",
            job_id=job_id,
        )


def _tell_what_ends(wiring: "Wiring") -> list[str]:
    """Warns of nightly jobs that were scheduled and will not be any more; their names."""
    from flows.nights import nights_that_end
    from flows.settings import settings_file

    names = nights_that_end(wiring)
    job = wiring.settings.nightly.job
    cause = "BLEND_NIGHTLY__JOB is not set" if job is None else f"BLEND_NIGHTLY__JOB is {job}"
    for name in names:
        tell(
            f"warning: the nightly job {name!r} was scheduled and is not any more, since {cause}; to keep "
            f"it, name its job file in {settings_file(wiring.settings.home)} and run `blend up` again."
        )
    return names


def _nightly_text(job: Path | None, next_at: datetime | None) -> str:
    """What runs every night, and when next."""
    if job is None:
        return "Every night: nothing (BLEND_NIGHTLY__JOB names a job file)"
    when = "never by its schedule" if next_at is None else f"next at {next_at:%Y-%m-%d %H:%M %Z}"
    return f"Every night: {job}, {when} (BLEND_NIGHTLY__CRON, BLEND_NIGHTLY__TIMEZONE)"


def down() -> None:
    """Stop these services; data stays.

    \b
    Example:
      blend down
    """
    from flows.cli.services import local_stack
    from flows.settings import load_settings

    stack = local_stack(load_settings())
    stopped: list[str] = []

    def progress(line: str) -> None:
        stopped.append(line)
        tell(line)

    stack.down(progress)
    if not stopped:
        tell(f"Nothing was running in {stack.home}.")


def prefect_ui_url(api_url: str | None) -> str | None:
    """The address of Prefect's pages for a browser."""
    return None if api_url is None else api_url.rstrip("/").removesuffix("/api")
