"""A completion window that closes: what is done by then counts, and only what is not makes a job expire."""

from typing import Any

import pytest
import sqlalchemy as sa

from flows.job_outcome import JobOutcome
from flows.progress import SilentProgress
from flows.running import create_job, run_job, run_stages
from flows.stages import JobContext
from flows.stopping import StopReason, StopSignal
from flows.wiring import Wiring
from storage.jobs import get_job
from tests.e2e.watched_run import Watching, assert_sums_hold

pytestmark = [pytest.mark.postgres, pytest.mark.s3]


class ClosingAfter(SilentProgress):
    """Closes the window when a stage has ended."""

    def __init__(self, stop: StopSignal, stage: str) -> None:
        self._stop = stop
        self._stage = stage

    def stage_finished(self, stage: str, detail: str) -> None:
        if stage == self._stage:
            self._stop.request(StopReason.EXPIRED)


def run(wiring: Wiring, job_id: str, stop: StopSignal, progress: SilentProgress) -> JobOutcome:
    return run_stages(wiring, job_id, progress, stop, lambda name, stage, context: stage(context))


def test_a_job_of_which_every_line_has_a_result_completes_though_the_window_closed(
    wiring: Wiring, make_job: Any
) -> None:
    job_id = create_job(wiring, make_job(bad_lines=(b"{", b"[]")))
    stop = StopSignal()

    outcome = run(wiring, job_id, stop, ClosingAfter(stop, "ingest"))

    assert (outcome.status, outcome.errored, outcome.expired, outcome.total) == ("completed", 2, 0, 2)
    assert outcome.error_uris


def test_what_expired_stays_so_when_the_export_is_done_by_a_later_run(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=2, bad_lines=(b"{",)))
    stop = StopSignal()

    def without_export(name: str, stage: Any, context: JobContext) -> str:
        if name == "export":
            raise RuntimeError("the machine stops")
        return str(stage(context))

    with pytest.raises(RuntimeError, match="the machine stops"):
        run_stages(wiring, job_id, ClosingAfter(stop, "ingest"), stop, without_export)
    assert get_job(wiring.database, job_id).num_expired == 2
    with wiring.database.connect() as connection:
        connection.execute(
            sa.text("UPDATE batch_job SET expires_at = clock_timestamp() WHERE job_id = :id"), {"id": job_id}
        )

    outcome = run(wiring, job_id, StopSignal(), SilentProgress())

    assert (outcome.status, outcome.errored, outcome.expired, outcome.total) == ("expired", 1, 2, 3)


def test_a_job_that_was_never_read_expires(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(bad_lines=(b"{",)))
    stop = StopSignal()
    stop.request(StopReason.EXPIRED)

    outcome = run(wiring, job_id, stop, SilentProgress())

    assert (outcome.status, outcome.total) == ("expired", 0)


def close_window(wiring: Wiring, job_id: str) -> None:
    with wiring.database.connect() as connection:
        connection.execute(
            sa.text("UPDATE batch_job SET expires_at = clock_timestamp() WHERE job_id = :job_id"),
            {"job_id": job_id},
        )


def test_what_is_not_done_when_the_window_closes_expires(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=1500, max_tokens=200, completion_window_hours=1))

    outcome = run_job(wiring, job_id, Watching(10, lambda: close_window(wiring, job_id)))

    assert outcome.status == "expired"
    assert outcome.succeeded >= 1
    assert outcome.expired >= 1
    assert outcome.output_uris
    assert_sums_hold(wiring, job_id, 1500)
