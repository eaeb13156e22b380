"""`blend validate` and `blend plan`: look at requests before anything runs."""

from collections import Counter
from typing import Annotated, Any

import typer

from flows.cli.output import Json, print_json, print_line

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE", help="OpenAI Batch JSONL, plain or gzip: a local file or s3://bucket/key."
    ),
]
DefaultMaxTokens = Annotated[
    int,
    typer.Option("--max-tokens", min=1, help="Longest answer of a request that does not say `max_tokens`."),
]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(validate)


def validate(
    source: Source,
    model: Annotated[
        str | None, typer.Option(help="Refuse requests that ask for another model, as `strict_model` does.")
    ] = None,
    json: Json = False,
) -> None:
    """Check a request file line by line.

    Prints each bad line with its number, code and reason. Needs neither services nor a model. Blank lines do
    not count. Prompts too long for a model are found when the job runs.

    \b
    Examples:
      blend validate requests.jsonl
      blend validate requests.jsonl.gz --json
    """
    from flows.cli.source_lines import MAX_LINE_BYTES, source_lines
    from flows.dry_run import check_lines
    from flows.ingest.parse import ParseOptions

    options = ParseOptions(model or "", strict_model=model is not None, max_line_bytes=MAX_LINE_BYTES)
    errors: list[dict[str, Any]] = []
    total = 0
    for line in check_lines(source_lines(source), options):
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
                "error_codes": dict(codes.most_common()),
                "errors": errors,
            }
        )
        return
    for error in errors:
        name = f" ({error['custom_id']})" if error["custom_id"] is not None else ""
        print_line(f"line {error['line']}{name}: {error['code']}: {error['reason']}")
    print_line(f"{total:,} requests: {total - len(errors):,} valid, {len(errors):,} invalid")
