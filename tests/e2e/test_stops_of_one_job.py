"""What stops one job stops no other of the same process, and a run that is to stop completes nothing."""

from typing import Any

import pytest
import sqlalchemy as sa

from blend_core.errors import StaleRunError, StorageError
from flows.progress import SilentProgress
from flows.running import create_job, run_stages
from flows.stages import JobContext
from flows.stopping import StopReason, StopSignal
from flows.wiring import Wiring
from storage.jobs import get_job, request_cancel

pytestmark = [pytest.mark.postgres, pytest.mark.s3]


def call(name: str, stage: Any, context: JobContext) -> str:
    return str(stage(context))


@pytest.fixture
def job_ids(wiring: Wiring, make_job: Any) -> tuple[str, str]:
    """Two jobs that no engine is needed for."""
    spec = make_job(bad_lines=(b"{",))
    return create_job(wiring, spec), create_job(wiring, spec)


def test_a_job_that_is_overdue_holds_up_no_other(wiring: Wiring, job_ids: tuple[str, str]) -> None:
    with wiring.database.connect() as connection:
        connection.execute(
            sa.text("UPDATE batch_job SET expires_at = clock_timestamp() WHERE job_id = :id"),
            {"id": job_ids[0]},
        )
    process = StopSignal()

    overdue, other = (run_stages(wiring, job_id, SilentProgress(), process, call) for job_id in job_ids)

    assert (overdue.status, other.status, other.errored) == ("expired", "completed", 1)
    assert process.reason is None


def test_a_job_that_is_cancelled_cancels_no_other(wiring: Wiring, job_ids: tuple[str, str]) -> None:
    request_cancel(wiring.database, job_ids[0])
    process = StopSignal()

    cancelled, other = (run_stages(wiring, job_id, SilentProgress(), process, call) for job_id in job_ids)

    assert (cancelled.status, other.status, other.errored) == ("cancelled", "completed", 1)
    assert process.reason is None


def test_a_run_that_lost_its_job_completes_it_never(wiring: Wiring, job_ids: tuple[str, str]) -> None:
    lost = StopSignal()
    lost.request(StopReason.LOST)

    with pytest.raises(StaleRunError):
        run_stages(wiring, job_ids[0], SilentProgress(), lost, call)

    assert get_job(wiring.database, job_ids[0]).status == "validating"


@pytest.mark.parametrize("reason", [StopReason.CANCELLED, StopReason.INTERRUPTED, StopReason.EXPIRED])
def test_a_run_that_is_told_to_stop_while_it_exports_has_succeeded(
    wiring: Wiring, job_ids: tuple[str, str], reason: StopReason
) -> None:
    stop = StopSignal()

    class StoppedInExport(SilentProgress):
        def stage_started(self, stage: str, detail: str) -> None:
            if stage == "export":
                stop.request(reason)

    outcome = run_stages(wiring, job_ids[0], StoppedInExport(), stop, call)

    assert outcome.status == "completed"
    with wiring.database.connect() as connection:
        statement = sa.text("SELECT status FROM run WHERE job_id = :id")
        assert connection.execute(statement, {"id": job_ids[0]}).scalars().all() == ["succeeded"]


def test_a_job_whose_sources_were_never_read_is_not_completed(
    wiring: Wiring, job_ids: tuple[str, str]
) -> None:
    def without_ingest(name: str, stage: Any, context: JobContext) -> str:
        return "" if name == "ingest" else str(stage(context))

    with pytest.raises(StorageError, match="never read"):
        run_stages(wiring, job_ids[0], SilentProgress(), StopSignal(), without_ingest)

    assert run_stages(wiring, job_ids[0], SilentProgress(), StopSignal(), call).status == "completed"
