import pytest

from blend_core.errors import EngineDiedError
from flows.run_lease import held_job
from flows.stopping import StopSignal
from storage.database import Database
from storage.ownership import Run


def test_why_a_run_failed_is_told_although_the_database_is_away(closed_port: int) -> None:
    away = Database(f"postgresql://me@127.0.0.1:{closed_port}/name")
    run = Run("run_1", "job_1", 1)

    with pytest.raises(EngineDiedError, match="out of memory"), held_job(away, run, StopSignal()):
        raise EngineDiedError("The engine ran out of memory.")
