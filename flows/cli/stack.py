"""`blend up` and `blend down`: the embedded services of this machine."""

from datetime import datetime
from pathlib import Path

import typer

from flows.cli.output import Json, print_json, print_line, tell


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
    Submitted jobs run with the settings of this command's environment: after a change run it again.

    \b
    Example:
      blend up
    """
    from flows.cli.services import brought_up, local_stack
    from flows.dates import utc_now
    from flows.nights import check_nightly, next_night
    from flows.settings import load_settings

    nightly = load_settings().nightly
    check_nightly(nightly)
    with brought_up(serve=True) as wiring:
        stack = local_stack(wiring.settings)
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
