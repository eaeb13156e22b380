"""The distribution as people install it: its wheel brings its tables along."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from storage.database import Database

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
PARTS = ("blend_core", "storage", "flows", "infra", "migrations", "pyproject.toml", "README.md", "LICENSE")

UPGRADE = """
import os, pathlib, migrations, storage
from storage.database import Database
unpacked = pathlib.Path(os.environ["PYTHONPATH"])
assert all(unpacked in pathlib.Path(one.__file__).parents for one in (migrations, storage))
print(Database(os.environ["TEST_DATABASE_URL"]).upgrade())
"""


def test_a_wheel_upgrades_a_database_even_from_two_processes_at_once(
    empty_database_url: str, tmp_path: Path
) -> None:
    source, wheels, unpacked = tmp_path / "source", tmp_path / "wheels", tmp_path / "unpacked"
    source.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, source / part)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", str(wheels), str(source)], check=True)
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)

    environment = {**os.environ, "PYTHONPATH": str(unpacked), "TEST_DATABASE_URL": empty_database_url}
    upgrades = [
        subprocess.Popen(
            [sys.executable, "-c", UPGRADE], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [upgrade.communicate()[0].strip() for upgrade in upgrades]
    assert [upgrade.returncode for upgrade in upgrades] == [0, 0]
    database = Database(empty_database_url)
    assert outputs == [database.current_revision()] * 2
    database.dispose()
