"""`blend demo`: a real mixed batch on this machine."""

import typer

from flows.cli.output import Json


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(demo)


def demo(
    json: Json = False,
) -> None:
    """Run a mixed batch on a small model.

    Requests come from S3 and from a Postgres table, answers end in SQL. Brings up what is missing, adds the model SmolLM2-135M, and runs about 340 requests, six of them broken on
    purpose. Takes a few minutes on two CPU cores.

    \b
    Example:
      blend demo
    """
