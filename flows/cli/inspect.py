"""`blend results`, `report` and `cancel`: one job as it stands in the database."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blend_core.errors import ConfigurationError
from flows.cli.output import Json, print_json, print_line, print_table, tell

if TYPE_CHECKING:
    from storage.results import ResultRow

JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job (`blend status`).")]
TABLE_TEXT_WIDTH = 60
_FORMULA_BEGINNINGS = ("=", "+", "-", "@", "\t", "\r")


class ResultFormat(StrEnum):
    """How `blend results` prints."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    TABLE = "table"


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(results)
    app.command()(report)
    app.command()(cancel)


def results(
    job_id: JobId,
    format_: Annotated[ResultFormat, typer.Option("--format", help="How to print.")] = ResultFormat.JSONL,
    errors: Annotated[
        bool, typer.Option("--errors", help="Only the error rows, with line, code and reason.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Print at most this many rows.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write into this file, which appears when complete."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print exactly one JSON object, with all rows in `results`.")
    ] = False,
) -> None:
    """Print a job's answers and errors.

    One row per request, in the order of the sources. With `--format csv` a text that begins with = + - @, a
    tab or a carriage return gets a leading apostrophe, so that no spreadsheet runs it as a formula; the other
    formats print it as it is.

    \b
    Examples:
      blend results job_01m8kzrqrsafg01r9jwt > answers.jsonl
      blend results job_01m8kzrqrsafg01r9jwt --errors --format table
      blend results job_01m8kzrqrsafg01r9jwt --format parquet --output answers.parquet
    """
    from flows.cli.services import connected
    from storage.jobs import get_job
    from storage.results import iter_results

    if format_ is ResultFormat.PARQUET and (output is None or json):
        raise ConfigurationError("--format parquet is no text to print; give --output FILE, without --json.")
    with connected() as wiring, _complete_file(output) as file:
        job = get_job(wiring.database, job_id)
        rows = _chosen(iter_results(wiring.database, job_id, objects=wiring.objects), errors, limit)
        if file is None:
            _print_rows(job_id, rows, format_, json=json)
        elif format_ is ResultFormat.PARQUET:
            from storage.result_table import ResultTable

            with ResultTable(file, job_id, job.model) as table:
                for row in rows:
                    table.add(row)
        else:
            with io.TextIOWrapper(file, encoding="utf-8", newline="") as text, redirect_stdout(text):
                _print_rows(job_id, rows, format_, json=json)


def _print_rows(job_id: str, rows: Iterator["ResultRow"], format_: ResultFormat, *, json: bool) -> None:
    import csv
    import json as json_module

    if json:
        print_json({"job_id": job_id, "results": [_plain(row) for row in rows]})
    elif format_ is ResultFormat.JSONL:
        for row in rows:
            print_line(json_module.dumps(_plain(row), ensure_ascii=False, default=str))
    elif format_ is ResultFormat.CSV:
        writer: csv.DictWriter[str] | None = None
        for row in rows:
            plain = _plain(row)
            if writer is None:
                writer = csv.DictWriter(sys.stdout, list(plain), lineterminator="\n")
                writer.writeheader()
            writer.writerow({name: _spreadsheet_cell(value) for name, value in plain.items()})
    else:
        print_table(("line", "custom_id", "status", "tokens", "text"), (_table_row(row) for row in rows))


@contextmanager
def _complete_file(path: Path | None) -> Iterator[io.BufferedWriter | None]:
    """A file that gets its name at a clean exit; None for None."""
    if path is None:
        yield None
        return
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    except OSError as error:
        raise ConfigurationError(f"The file {path} cannot be written ({error.strerror}).") from None
    finally:
        part.unlink(missing_ok=True)


def report(
    job_id: JobId,
    what_if: Annotated[
        str, typer.Option("--what-if", metavar="DEVICE", help="Tell density for this device profile as well.")
    ] = "a100-80g",
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw density over time into a .png or .svg."),
    ] = None,
    json: Json = False,
) -> None:
    """Tell what a job did.

    Counts, speed, prefix sharing, and the compute density of its batches.

    \b
    Examples:
      blend report job_01m8kzrqrsafg01r9jwt
      blend report job_01m8kzrqrsafg01r9jwt --what-if h100 --plot density.svg
    """
    from blend_core.specs import ModelSpec, load_device_profile
    from flows.cli.services import connected
    from flows.job_spec import parse_job
    from flows.report import build_report
    from flows.report_format import density_plot, report_text
    from storage.jobs import get_job

    with connected() as wiring:
        job = get_job(wiring.database, job_id)
        device = load_device_profile(what_if)
        model: ModelSpec | None = None
        try:
            model = wiring.model_spec(parse_job(job.spec, origin=job_id))
        except ConfigurationError as error:
            tell(f"Told without --what-if: {error}")
        built = build_report(wiring.database, job_id, model, device)
    if plot is not None:
        density_plot(built, plot)
    if json:
        print_json(built.as_json())
    else:
        print_line(report_text(built))


def cancel(
    job_id: JobId,
    json: Json = False,
) -> None:
    """Stop a job and keep what has finished.

    Finished answers are exported; the rest becomes `cancelled`.

    \b
    Example:
      blend cancel job_01m8kzrqrsafg01r9jwt
    """
    from flows.cli.services import connected
    from flows.progress import SilentProgress
    from flows.running import cancel_job

    with connected() as wiring:
        state = cancel_job(wiring, job_id, SilentProgress())
    if json:
        print_json({"job_id": job_id, "status": state})
    else:
        print_line(f"Job {job_id} is {state}.")


def _chosen(rows: Iterator["ResultRow"], errors: bool, limit: int | None) -> Iterator["ResultRow"]:
    num_left = limit
    for row in rows:
        if num_left == 0:
            return
        if errors and row.error_code is None:
            continue
        num_left = None if num_left is None else num_left - 1
        yield row


def _plain(row: "ResultRow") -> dict[str, Any]:
    plain = asdict(row)
    for name in ("started_at", "finished_at"):
        plain[name] = None if plain[name] is None else plain[name].isoformat()
    return plain


def _spreadsheet_cell(value: object) -> object:
    """A text that a spreadsheet would run as a formula gets a leading apostrophe, as OWASP advises."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_BEGINNINGS) else value


def _table_row(row: "ResultRow") -> tuple[object, ...]:
    text = row.output_text if row.error_code is None else f"{row.error_code}: {row.error_message}"
    short = " ".join((text or "").split())
    if row.error_code is None and len(short) > TABLE_TEXT_WIDTH:
        short = f"{short[: TABLE_TEXT_WIDTH - 1]}…"
    place = f"{row.source_uri.rsplit('/', 1)[-1]}:{row.source_line}"
    return place, row.custom_id, row.status, row.num_output_tokens, short
