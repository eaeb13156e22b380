"""Help that teaches, and that answers at once."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from flows.cli.app import app


def commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


ROOT = typer.main.get_command(app)
COMMANDS = dict(commands(ROOT, "blend"))


def test_every_promised_command_is_there() -> None:
    promised = (
        "demo up down upload submit run plan validate status results cancel report profile "
        "bench-ablation bench-engine bench-grid bench-ingest bench-paper bench-plan bench-policy bench-ranks "
        "bench-record bench-simulate bench-traces db-upgrade db-url model-add model-list "
        "backfill watermark-show watermark-reset write-back"
    )
    assert {name.replace(" ", "-") for name in COMMANDS} == {f"blend-{name}" for name in promised.split()}


@pytest.mark.parametrize("path", COMMANDS)
def test_a_command_says_what_it_does_and_shows_an_example(path: str) -> None:
    help_text = COMMANDS[path].help or ""
    assert len(help_text.splitlines()[0]) <= 60, "the first line must fit the list of commands"
    assert "Example" in help_text
    assert path in help_text, "the example must be of this command"


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_is_explained(path: str) -> None:
    for parameter in COMMANDS[path].params:
        assert getattr(parameter, "help", None), f"{path} {parameter.name} lacks help"


READING = [path for path in COMMANDS if path != "blend down"]


@pytest.mark.parametrize("path", READING)
def test_a_command_with_a_result_can_print_json(path: str) -> None:
    assert any("--json" in parameter.opts for parameter in COMMANDS[path].params)


def test_help_loads_no_heavy_library() -> None:
    code = (
        "import sys\n"
        "from flows.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'prefect', 'torch', 'transformers', 'sqlalchemy', 'boto3', 'numpy', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
