"""The application: its groups, and how errors become one sentence and an exit status."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from blend_core.errors import BlendError, ConfigurationError
from flows.cli import bench, check, database, demo, inspect, models, profile, run, stack, status
from flows.cli.output import tell

EXIT_FAILED = 1
EXIT_USAGE = 2

app = typer.Typer(
    name="blend",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def blend(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error instead of one sentence.")
    ] = False,
) -> None:
    """Offline LLM inference as a nightly data job.

    Requests lie in S3 files and Postgres rows. `blend` plans the whole batch by compute density and shared
    prefixes, runs it, and leaves every answer in SQL.

    \b
    Start here:
      blend demo                          a mixed batch on a small model, services included
      blend run --s3 s3://bucket/in.jsonl run your own requests
      blend status                        what runs and what ran

    Results go to stdout, progress and errors to stderr. Exit status: 0 done (error rows included), 1 failed,
    2 wrong usage or configuration.
    """


for group in (demo, stack, run, check, status, inspect, profile, bench, database, models):
    group.register(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command line and exits the process with its status.

    A `BlendError` is printed as its sentence: status 2 for a `ConfigurationError`, 1 for any other.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(given, prog_name="blend")
    except BlendError as error:
        _fail(error, str(error), EXIT_USAGE if isinstance(error, ConfigurationError) else EXIT_FAILED, given)
    except Exception as error:
        sentence = f"Unexpected {type(error).__name__}; `blend --debug …` shows where it came from."
        _fail(error, sentence, EXIT_FAILED, given)


def _fail(error: Exception, sentence: str, status: int, given: list[str]) -> None:
    if "--debug" in given:
        raise error
    tell(f"blend: {sentence}")
    sys.exit(status)
