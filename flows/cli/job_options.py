"""Options of `blend run` and `blend submit` that give a job, and the job that they give."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blend_core.errors import ConfigurationError

if TYPE_CHECKING:
    from datetime import date

    from flows.job_spec import BatchJobSpec

_FIRST_LINE_BYTES = 1 << 16

JobFile = Annotated[
    Path | None,
    typer.Argument(metavar="[JOB.yaml]", help="Job file; or give the job by options.", show_default=False),
]
S3 = Annotated[
    list[str] | None,
    typer.Option(
        "--s3",
        metavar="URI",
        help="OpenAI Batch JSONL or Parquet, s3://bucket/key or s3://bucket/folder/ (a local file: "
        "`blend upload` it first); repeatable.",
    ),
]
Parquet = Annotated[
    str | None,
    typer.Option("--parquet", metavar="URI", help="A table in S3, addressed as for --s3; needs --prompt."),
]
Sql = Annotated[Path | None, typer.Option("--sql", metavar="FILE", help="File with one SELECT statement.")]
Prompt = Annotated[
    str | None,
    typer.Option(help="Jinja template over the columns of --sql or --parquet: 'Summarise: {{ body }}'."),
]
System = Annotated[str | None, typer.Option(help="Jinja template of the system message, beside --prompt.")]
IdColumn = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Column of --sql or --parquet that becomes `custom_id`; `id` if left out, '' for none.",
    ),
]
Connection = Annotated[
    str | None,
    typer.Option(
        help="NAME of a BLEND_SOURCES__NAME variable with the Postgres URL of --sql; the platform's own "
        "database if left out."
    ),
]
Model = Annotated[str | None, typer.Option(help="Model by name (`blend model list`).")]
PolicyName = Annotated[
    str | None, typer.Option("--policy", help="density_matched, dual_scan, dfs, fcfs or random.")
]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Longest answer of a request that does not say `max_tokens`.")
]
Name = Annotated[str | None, typer.Option(help="Name of the job in lists and reports.")]
JobId = Annotated[
    str | None, typer.Option("--job-id", metavar="JOB", help="Continue this job instead of creating one.")
]
IdempotencyKey = Annotated[
    str | None,
    typer.Option(
        "--idempotency-key",
        metavar="KEY",
        help="A name of yours for this job, such as its night: the same key again is the same job.",
    ),
]
LogicalDate = Annotated[
    str | None,
    typer.Option(
        "--logical-date",
        metavar="DAY",
        help="Day that the job is about, 2026-11-28: {logical_date} of its sources. Default: today in "
        "BLEND_NIGHTLY__TIMEZONE.",
    ),
]


def logical_day(text: str | None) -> "date | None":
    """The day of --logical-date.

    Raises:
        ConfigurationError: it is no day.
    """
    from flows.dates import parse_date

    return None if text is None else parse_date(text, origin="--logical-date")


def given_fields(
    s3: list[str] | None,
    parquet: str | None,
    sql: Path | None,
    prompt: str | None,
    system: str | None,
    id_column: str | None,
    connection: str | None,
    model: str | None,
    policy: str | None,
    max_tokens: int | None,
    name: str | None,
) -> dict[str, Any]:
    """The parts of a job that options gave, in the shape of a job file.

    Raises:
        ConfigurationError: one option lacks another, or names a local file.
    """
    if sql is None and connection is not None:
        raise ConfigurationError("--connection belongs to a query; give it with --sql FILE.")
    if sql is None and parquet is None and not (prompt is system is id_column is None):
        raise ConfigurationError(
            "--prompt, --system and --id-column belong to rows; give --sql FILE or --parquet URI with them."
        )
    for address in [*(s3 or []), *([parquet] if parquet else [])]:
        if not address.startswith("s3://") and Path(address).exists():
            raise ConfigurationError(
                f"{address} is a file of this machine, and jobs read S3; put it there with "
                f"`blend upload {address}` and give the address that it prints."
            )
    given: dict[str, Any] = {"model": model, "name": name, "s3": s3}
    template = {"prompt": prompt, "system": system, "id_column": id_column}
    if (sql is not None or parquet is not None) and prompt is None:
        raise ConfigurationError("--sql and --parquet need --prompt, a template over their columns.")
    if parquet is not None:
        given["parquet"] = [_said({"uri": parquet, **template})]
    if sql is not None:
        given["sql"] = [_said({"query": _query(sql), "connection": connection, **template})]
    options = {"policy": policy, "default_max_tokens": max_tokens}
    given["options"] = _said(options) or None
    return {key: value for key, value in given.items() if value}


def _said(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _query(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The query file {path} cannot be read ({type(error).__name__}).") from None


def new_job(
    job_id: str | None,
    job_file: Path | None,
    given: dict[str, Any],
    idempotency_key: str | None,
    logical_date: str | None,
) -> "BatchJobSpec | None":
    """The job to create; None where `job_id` continues one.

    Raises:
        ConfigurationError: `job_id` comes with what would make another job, or the job is wrong.
    """
    if job_id is None:
        return job_of(job_file, given)
    if job_file is not None or given or not (idempotency_key is logical_date is None):
        raise ConfigurationError("--job-id continues a job as it is; leave out the job file and its options.")
    return None


def job_of(job_file: Path | None, given: dict[str, Any]) -> "BatchJobSpec":
    """The job of a file with the options over it, or of the options alone.

    Raises:
        ConfigurationError: the file cannot be read or is a request file, or a field is wrong.
    """
    from flows.job_spec import load_job_file, parse_job

    if job_file is None:
        return parse_job(given, origin="job from options")
    if _holds_requests(job_file):
        raise ConfigurationError(
            f"{job_file} looks like a request file, not a job file; put it into S3 with "
            f"`blend upload {job_file}` and run it with --s3 and the address that it prints."
        )
    spec = load_job_file(job_file)
    if not given:
        return spec
    content = spec.model_dump(mode="json", exclude_unset=True)
    options = content.get("options", {}) | given.get("options", {})
    return parse_job(content | given | ({"options": options} if options else {}), origin=str(job_file))


def _holds_requests(path: Path) -> bool:
    """Whether a file is request lines, by its name or by how it begins."""
    if path.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        return path.exists()
    try:
        with path.open("rb") as file:
            content = file.read(_FIRST_LINE_BYTES)
    except OSError:
        return False
    # Parquet, gzip or zstd: a job file is none of these.
    if content.startswith((b"PAR1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return True
    first = content.partition(b"\n")[0]
    return first.startswith(b"{") and (b'"custom_id"' in first or b'"body"' in first)
