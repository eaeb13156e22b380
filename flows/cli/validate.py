"""`blend validate`: check requests line by line before anything runs."""

from collections import Counter
from typing import Annotated, Any

import typer

from blend_core.wording import count_text
from flows.cli.output import Json, print_json, print_line, tell

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="OpenAI Batch JSONL (plain, gzip or zstd) or Parquet: a local file or s3://bucket/key.",
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
    services for s3:// only. Blank lines do not count. How many tokens a prompt has, only the model's
    tokenizer knows: prompts too long for it are found with --model where its files are here, else when
    the job runs.
    Exits with 0 whatever it finds: a job goes on beside bad lines. A gate asks --json for "invalid".

    \b
    Examples:
      blend validate requests.jsonl
      blend validate requests.jsonl.gz --json
      blend validate requests.parquet --model smollm2-135m
    """
    from flows.cli.source_items import source_items
    from flows.dry_run.lines import checked_items, tokenised_items
    from flows.dry_run.model import find_tokenizer
    from flows.ingest.parse import ParseOptions
    from flows.settings import load_settings

    options = ParseOptions(model or "", strict_model=model is not None)
    found = None if model is None else find_tokenizer(load_settings(), model, tell)
    lines = checked_items(source_items(source, options))
    if found is not None:
        lines = tokenised_items(lines, found.tokenizer, found.max_model_len)
    errors: list[dict[str, Any]] = []
    total = 0
    for line in lines:
        total += 1
        if line.code is not None:
            errors.append(
                {
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
                "lengths_checked": found is not None,
                "error_codes": dict(codes.most_common()),
                "errors": errors,
            }
        )
        return
    for error in errors:
        name = f" ({error['custom_id']})" if error["custom_id"] is not None else ""
        print_line(f"line {error['line']}{name}: {error['code']}: {error['reason']}")
    print_line(
        f"{count_text(total, 'request')}: {total - len(errors):,} valid, {len(errors):,} invalid"
        f"{'' if found is not None else _lengths_untold(model)}"
    )


def _lengths_untold(model: str | None) -> str:
    """Why the lengths of prompts were not checked, behind a count."""
    if model is None:
        return "; lengths of prompts are not checked without --model"
    return f"; lengths of prompts are not checked, {model} is not here with its tokenizer"
