"""`blend db` where the user's own database is all there is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage.database import Database

pytestmark = [pytest.mark.postgres]

COMMAND = [sys.executable, "-c", "from flows.cli import main; main()", "db", "upgrade", "--json"]


def test_upgrade_needs_the_database_alone(postgres_url: str, tmp_path: Path) -> None:
    env = {**os.environ, "BLEND_HOME": str(tmp_path), "BLEND_DATABASE__URL": postgres_url}
    env.pop("BLEND_OBJECT_STORE__ENDPOINT_URL", None)

    done = subprocess.run(COMMAND, env=env, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    database = Database(postgres_url)
    revision = database.current_revision()
    database.dispose()
    assert revision is not None
    assert json.loads(done.stdout) == {"revision": revision}


def test_without_any_database_it_says_how_to_get_one(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("BLEND_")}

    done = subprocess.run(
        COMMAND, env={**env, "BLEND_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 1
    assert "blend up" in done.stderr
    assert json.loads(done.stdout)["error"]["type"] == "ServiceError"
