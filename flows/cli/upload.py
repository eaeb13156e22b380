"""`blend upload`: request files of this machine into S3, where jobs read them."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.output import Json, print_json, print_line, tell

DEFAULT_PREFIX = "uploads/"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(upload)


def upload(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Request files, JSONL or Parquet; JSONL may be gzip or zstd."),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="URI",
            help="Folder to put them in, s3://bucket/folder/; uploads/ in the platform's bucket if left out.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Put request files into S3 and print their addresses.

    Jobs read S3 and Postgres, never a local file. This puts files into the S3 server of this machine, or
    into the store that BLEND_OBJECT_STORE__ENDPOINT_URL names; give the address that it prints to
    `blend run --s3`. A file of the same name in the same folder is replaced.

    \b
    Examples:
      blend upload requests.jsonl
      blend run --s3 s3://blend/uploads/requests.jsonl
      blend upload monday/*.jsonl --to s3://blend/monday/
    """
    from dataclasses import replace

    from blend_core.errors import ConfigurationError
    from flows.cli.services import brought_up
    from flows.wiring import Wiring
    from storage.objects import split_uri

    for path in paths:
        if not path.is_file():
            raise ConfigurationError(f"There is no file {path}; nothing was uploaded.")
    names = [path.name for path in paths]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ConfigurationError(
            f"Two of the files are called {repeated}, and one would replace the other; upload them apart, "
            "each with its own --to."
        )
    if to is not None and not to.startswith("s3://"):
        raise ConfigurationError(f"--to {to} is not an S3 address; write s3://bucket/folder/.")
    with brought_up() as wiring:
        objects, prefix = wiring.objects, DEFAULT_PREFIX
        if to is not None:
            bucket, prefix = split_uri(to)
            prefix = f"{prefix.rstrip('/')}/" if prefix else ""
            objects = Wiring.from_settings(
                wiring.settings, replace(wiring.endpoints, s3_bucket=bucket)
            ).objects
        entries = []
        for path in paths:
            tell(f"uploading {path}")
            entries.append(objects.put(f"{prefix}{path.name}", path))
    if json:
        print_json({"objects": [{"uri": entry.uri, "size_bytes": entry.size_bytes} for entry in entries]})
        return
    for entry in entries:
        print_line(entry.uri)
