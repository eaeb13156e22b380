import pytest

from blend_core.errors import EngineDiedError, StorageUnavailableError
from flows import run_lease
from flows.run_lease import held_job
from flows.stopping import StopSignal
from storage.database import Database
from storage.ownership import Run
from storage.runs import RunStatus


def test_why_a_run_failed_is_told_although_the_database_is_away(closed_port: int) -> None:
    away = Database(f"postgresql://me@127.0.0.1:{closed_port}/name")
    run = Run("run_1", "job_1", 1)

    with pytest.raises(EngineDiedError, match="out of memory"), held_job(away, run, StopSignal()):
        raise EngineDiedError("The engine ran out of memory.")


def test_the_end_of_a_run_is_written_down_when_the_database_is_back(
    closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Database(f"postgresql://me@127.0.0.1:{closed_port}/name")
    written: list[RunStatus] = []

    def finish(db: Database, run: Run, status: RunStatus) -> None:
        written.append(status)
        if len(written) < 3:
            raise StorageUnavailableError("Away.")

    monkeypatch.setattr(run_lease, "finish_run", finish)
    with held_job(away, Run("run_1", "job_1", 1), StopSignal()):
        pass

    assert written == [RunStatus.SUCCEEDED] * 3
