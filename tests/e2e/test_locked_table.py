"""A run that waits for a lock in the user's table hears that it is to end."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from flows.running import create_job
from flows.wiring import Wiring
from tests.e2e.watched_run import wait_for

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]

BAD_LINE = b'{"custom_id": "a", "method": "GET", "url": "/v1/chat/completions", "body": {}}'
WAITING = "SELECT FROM pg_locks WHERE relation = 'answer_locked'::regclass AND NOT granted"


def test_sigterm_ends_a_run_whose_table_is_locked_within_seconds(
    wiring: Wiring, environment: dict[str, str], make_job: Any, tmp_path: Path
) -> None:
    write_back = {"connection": "shop", "table": "answer_locked", "key_column": "id"}
    write_back["columns"] = {"text": "text", "status": "status"}  # type: ignore[assignment]
    url = wiring.endpoints.database_url
    targets = {"BLEND_TARGETS__SHOP": url}
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE answer_locked (id text PRIMARY KEY, text text, status text)")
        # No engine is needed for it.
        job_id = create_job(wiring, make_job(bad_lines=(BAD_LINE,), write_back=write_back))
        with psycopg.connect(url) as other, (tmp_path / "out").open("wb") as out:
            other.execute("LOCK answer_locked IN EXCLUSIVE MODE")
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from flows.cli import main; main()",
                    "run",
                    "--job-id",
                    job_id,
                    "--json",
                ],
                stdout=out,
                env={**os.environ, **environment, **targets},
            )
            try:
                wait_for(lambda: connection.execute(WAITING).rowcount, timeout_s=120)
                process.terminate()
                told_at_s = time.monotonic()
                assert process.wait(60) == 1
                took_s = time.monotonic() - told_at_s
            finally:
                process.kill()
                process.wait()
        connection.execute("DROP TABLE answer_locked")

    outcome = json.loads((tmp_path / "out").read_text())
    assert outcome["status"] == "completed"
    assert outcome["write_back_error"] == (
        "answer_locked is locked by another transaction; end that one and write back again."
    )
    # A wait of five seconds and the end of a process; without being told it would be a minute.
    assert took_s < 30
