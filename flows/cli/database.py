"""`blend db`: the platform's tables."""

from typing import Annotated

import typer

from flows.cli.output import Json, print_json, print_line

group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Adds the group."""
    app.add_typer(group, name="db", help="Upgrade the tables, print their address.")


@group.command()
def upgrade(
    json: Json = False,
) -> None:
    """Bring the tables up to date.

    Safe when several processes do it at once.

    \b
    Example:
      BLEND_DATABASE__URL=postgresql://user@host/blend blend db upgrade
    """
    from flows.cli.services import connected_database

    with connected_database() as database:
        revision = database.upgrade()
    if json:
        print_json({"revision": revision})
    else:
        print_line(f"The tables are at revision {revision}.")


@group.command()
def url(
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Address of the login that can read and nothing else.")
    ] = False,
    json: Json = False,
) -> None:
    """Print the database's address, password included.

    \b
    Example:
      psql "$(blend db url --read-only)"
    """
    from flows.cli.services import connected, read_only_url

    with connected() as wiring:
        address = read_only_url(wiring) if read_only else wiring.endpoints.database_url
    if json:
        print_json({"database_url": address, "read_only": read_only})
    else:
        print_line(address)
