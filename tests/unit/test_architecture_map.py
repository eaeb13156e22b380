"""The map in ARCHITECTURE.md names every module, and no module that is gone."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("blend_core", "storage", "flows", "infra", "migrations")
# Described as a whole: one file per command group, one per revision.
WHOLE_FOLDERS = ("flows/cli", "flows/demo_data", "migrations/versions")


def modules() -> set[str]:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {
        path.name
        for path in paths
        if path.name != "__init__.py" and not str(path.relative_to(ROOT)).startswith(WHOLE_FOLDERS)
    }


def named() -> set[str]:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    the_map = text.split("## Map")[1].split("## Contracts")[0]
    return set(re.findall(r"\w+\.py", the_map))


def test_every_module_is_on_the_map() -> None:
    assert modules() - named() == set()


def test_the_map_names_no_module_that_is_gone() -> None:
    assert named() - modules() == set()
