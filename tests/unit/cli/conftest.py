"""Running the command line inside the test's process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.cli import main


@dataclass(frozen=True, slots=True)
class Ran:
    status: int
    stdout: str
    stderr: str


@pytest.fixture
def blend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Ran]:
    """Runs `blend ARGUMENTS` with an empty state folder."""
    monkeypatch.setenv("BLEND_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        captured = capsys.readouterr()
        status = exit_.value.code
        return Ran(status if isinstance(status, int) else 0, captured.out, captured.err)

    return run
