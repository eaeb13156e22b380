"""`blend validate`: check requests line by line before anything runs."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blend_core.wording import count_text
from flows.cli.output import Json, print_json, print_line, tell

if TYPE_CHECKING:
    from flows.dry_run.lines import CheckedLine

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="OpenAI Batch JSONL (plain, gzip or zstd) or Parquet: a local file or s3://bucket/key; or a job "
        "file, .yaml.",
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(validate)


def validate(
    source: Source,
    model: Annotated[
        str | None,
        typer.Option(
            help="Check as a job of this model with `strict_model` does: other models are refused, and "
            "prompts are tokenised and their lengths checked if it is a model of the store or a folder."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check a request file line by line.

    Prints each bad line (or row, of Parquet) with its number, code and reason. Needs no model, and
    services for s3:// and job files only. Blank lines do not count. How many tokens a prompt has, only the
    model's tokenizer knows: prompts too long for it are found with --model, or for a job file, where its
    files are here, else when the job runs.
    Of a job file all sources are checked as the job would check them today: with its options, and with the
    context that its model would be served with.
    Exits with 0 whatever it finds: a job goes on beside bad lines. A gate asks --json for "invalid".

    \b
    Examples:
      blend validate requests.jsonl
      blend validate requests.jsonl.gz --json
      blend validate requests.parquet --model smollm2-135m
      blend validate night.yaml
    """
    errors: list[dict[str, Any]] = []
    total = 0
    with _opened(source, model) as opened:
        for line in opened.lines:
            total += 1
            if line.code is not None:
                errors.append(
                    {
                        "source": line.source_uri,
                        "line": line.number,
                        "custom_id": line.custom_id,
                        "code": line.code.value,
                        "reason": line.reason,
                    }
                )

    codes = Counter(error["code"] for error in errors)
    if json:
        print_json(
            {
                "source": source,
                "total": total,
                "valid": total - len(errors),
                "invalid": len(errors),
                "lengths_checked": opened.has_lengths,
                "error_codes": dict(codes.most_common()),
                "errors": errors,
            }
        )
        return
    for error in errors:
        name = f" ({error['custom_id']})" if error["custom_id"] is not None else ""
        place = "" if error["source"] == source else f"{error['source']}, "
        print_line(f"{place}line {error['line']}{name}: {error['code']}: {error['reason']}")
    print_line(
        f"{count_text(total, 'request')}: {total - len(errors):,} valid, {len(errors):,} invalid"
        f"{'' if opened.has_lengths else _lengths_untold(opened.model)}"
    )


@dataclass(frozen=True, slots=True)
class _Opened:
    """Lines to check, of this model if one is known, with the lengths of their prompts or without."""

    lines: "Iterator[CheckedLine]"
    model: str | None
    has_lengths: bool


@contextmanager
def _opened(source: str, model: str | None) -> "Iterator[_Opened]":
    """The lines of a request file or of a job file, under the rules of the model or of the job."""
    from flows.cli.source_items import source_items
    from flows.dry_run.lines import checked_items, tokenised_items
    from flows.dry_run.model import find_tokenizer
    from flows.ingest.parse import ParseOptions
    from flows.job_spec import JOB_FILE_SUFFIXES
    from flows.settings import load_settings

    settings = load_settings()
    if source.endswith(JOB_FILE_SUFFIXES):
        # Only here: these parts take a second to load.
        from flows.cli.job_file import ReadOptions, opened_job_file

        with opened_job_file(settings, source, ReadOptions(model), tell) as job:
            lines, name, has_lengths = job.lines, model or job.spec.model, job.tokenizer is not None
            if job.tokenizer is not None:
                lines = tokenised_items(lines, job.tokenizer, job.model.max_model_len)
            yield _Opened(lines, name, has_lengths)
        return
    found = None if model is None else find_tokenizer(settings, model, tell)
    lines = checked_items(source_items(source, ParseOptions(model or "", strict_model=model is not None)))
    if found is not None:
        lines = tokenised_items(lines, found.tokenizer, found.max_model_len)
    yield _Opened(lines, model, found is not None)


def _lengths_untold(model: str | None) -> str:
    """Why the lengths of prompts were not checked, behind a count."""
    if model is None:
        return "; lengths of prompts are not checked without --model"
    return f"; lengths of prompts are not checked, {model} is not here with its tokenizer"
