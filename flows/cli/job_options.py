"""Options of `blend run` and `blend submit` that give a job."""

from pathlib import Path
from typing import Annotated

import typer

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
IdempotencyKey = Annotated[
    str | None,
    typer.Option(
        "--idempotency-key",
        metavar="KEY",
        help="A name of yours for this job, such as its night: the same key again is the same job.",
    ),
]
