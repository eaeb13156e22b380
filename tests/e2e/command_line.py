"""`blend ARGUMENTS`, each command in a process of its own."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

RUN_MAIN = "from flows.cli import main; main()"
PREFECT_DOWN = {"PREFECT_API_URL": "http://127.0.0.1:9/api"}

Blend = Callable[..., "subprocess.CompletedProcess[str]"]


def blend_in(folder: Path, variables: Mapping[str, str]) -> Blend:
    """Returns what runs a command in a folder and an environment, and asserts how it exits."""

    def run(
        *arguments: str, status: int = 0, environment: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [sys.executable, "-c", RUN_MAIN, *arguments],
            env={**variables, **(environment or {})},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == status, done.stderr
        return done

    return run
