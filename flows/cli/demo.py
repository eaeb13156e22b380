"""`blend demo`: a real mixed batch on this machine."""

import sys
from typing import TYPE_CHECKING

import typer

from flows.cli.output import Json, print_json, print_line

if TYPE_CHECKING:
    from flows.demo_run import DemoOutcome
    from flows.wiring import Wiring


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(demo)


def demo(
    json: Json = False,
) -> None:
    """Run a mixed batch on a small model.

    Requests come from S3 and from a Postgres table, answers end in SQL. Brings up what is missing, adds the
    model SmolLM2-135M, and runs about 320 requests, six of them broken on purpose. Takes a few minutes on two
    CPU cores.

    \b
    Example:
      blend demo
    """
    import time

    from flows.cli.services import brought_up, read_only_url
    from flows.demo import DemoSize
    from flows.demo_run import run_demo
    from flows.progress import shown_progress

    with brought_up() as wiring:
        with shown_progress(sys.stderr, time.monotonic) as progress:
            outcome = run_demo(wiring, progress, DemoSize())
        database_url = read_only_url(wiring)
        if json:
            print_json(outcome.as_json(database_url))
        else:
            _print(wiring, outcome, database_url)
    if outcome.report.status != "completed":
        raise typer.Exit(1)


def _print(wiring: "Wiring", outcome: "DemoOutcome", database_url: str) -> None:
    from flows.cli.stack import prefect_ui_url
    from flows.demo_run import DEMO_QUERIES, run_query
    from flows.report_format import report_text

    job_id = outcome.report.job_id
    print_line("")
    print_line(report_text(outcome.report))
    print_line("")
    print_line(f"{outcome.num_s3:,} requests came from S3 and {outcome.num_postgres:,} from Postgres.")
    for question, query in DEMO_QUERIES:
        shown = query.strip().replace("%(job_id)s", f"'{job_id}'")
        print_line(f"\n-- {question}\n{shown}\n")
        print_line(run_query(database_url, query, job_id))
    print_line("\nWhat to try next:")
    ui_url = prefect_ui_url(wiring.endpoints.prefect_api_url)
    if ui_url is not None:
        where = "its flow run, tasks and artifacts" if outcome.as_flow else "the flows"
        print_line(f"  {ui_url}    Prefect's pages: {where}")
    print_line('  psql "$(blend db url --read-only)"    ask the tables yourself')
    print_line(f"  blend results {job_id} --errors --format table")
    print_line(f"  blend report {job_id} --plot density.svg")
    print_line("  blend upload your-requests.jsonl    then run them from the address that it prints:")
    print_line("  blend run --s3 s3://blend/uploads/your-requests.jsonl")
