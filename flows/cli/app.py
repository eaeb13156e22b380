"""The application: its groups, and how errors become one sentence and an exit status."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from blend_core.errors import BlendError, ConfigurationError
from flows.cli import (
    bench,
    database,
    demo,
    inspect,
    models,
    nights,
    plan,
    profile,
    run,
    stack,
    status,
    upload,
    validate,
)
from flows.cli.output import print_json, print_line, tell

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


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print_line(f"blend {version('blendserve')}")
        raise typer.Exit


@app.callback()
def blend(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
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
      blend upload in.jsonl               your own requests into S3; prints their address
      blend run --s3 s3://blend/uploads/in.jsonl   run them
      blend status                        what runs and what ran

    Results go to stdout, progress and errors to stderr; with --json a failure is one JSON object, too.
    Exit status: 0 done (error rows included), 1 failed, or the job expired or was cancelled, 2 wrong usage or
    configuration, 130 ended at once by Ctrl-C, which while a job runs takes a second one.
    """


for group in (
    demo,
    stack,
    upload,
    run,
    validate,
    plan,
    status,
    inspect,
    nights,
    profile,
    bench,
    database,
    models,
):
    group.register(app)


def run_command(arguments: Sequence[str]) -> None:
    """Runs one command line and exits the process with its status.

    A `BlendError` is printed as its sentence: status 2 for a `ConfigurationError`, 1 for any other. With
    `--json` every failure also prints one JSON object, `{"error": {"type", "message", "retryable", ids…}}`.
    """
    given = list(arguments)
    try:
        app(given, prog_name="blend")
    except BlendError as error:
        _fail(error, str(error), EXIT_USAGE if isinstance(error, ConfigurationError) else EXIT_FAILED, given)
    except SystemExit as exit_:
        cause = _untold_cause(exit_)
        if cause is not None:
            _print_error(cause, given)
        raise
    except Exception as error:
        sentence = f"Unexpected {type(error).__name__}; `blend --debug …` shows where it came from."
        _fail(error, sentence, EXIT_FAILED, given)


def _untold_cause(exit_: SystemExit) -> BaseException | None:
    """What typer has ended the process for, unless a command that had printed its result asked for it."""
    cause = exit_.__context__
    if isinstance(cause, typer.Exit):
        return cause.__cause__
    # A reader of stdout that is gone is told nothing.
    return None if isinstance(cause, OSError) else cause


def _fail(error: Exception, sentence: str, status: int, given: list[str]) -> None:
    _print_error(error, given, sentence)
    if "--debug" in given:
        raise error
    tell(f"blend: {sentence}")
    sys.exit(status)


def _print_error(error: BaseException, given: list[str], sentence: str | None = None) -> None:
    if "--json" not in given:
        return
    if sentence is None:
        of_usage = getattr(error, "format_message", None)
        sentence = "The command was interrupted." if of_usage is None else of_usage()
    about = {
        "type": type(error).__name__,
        "message": sentence,
        "retryable": getattr(error, "retryable", isinstance(error, KeyboardInterrupt)),
    }
    print_json({"error": getattr(error, "ids", {}) | about})
