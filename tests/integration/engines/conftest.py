from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def tests_importable_in_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process imports its engine by module name: `tests` must be on the path that it inherits."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
