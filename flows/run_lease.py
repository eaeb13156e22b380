"""A run's hold on its job: taken, kept while the stages work, and written off at the end."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC

from blend_core.errors import (
    BlendError,
    RunInterruptedError,
    StaleRunError,
    StorageError,
    StorageUnavailableError,
)
from flows.heartbeat import Heartbeat
from flows.lease_holder import holder_details, holder_text, is_gone
from flows.outage import through_outages
from flows.progress import Progress
from flows.stopping import StopReason, StopSignal, thread_end_s
from storage.database import Database
from storage.job_status import JobStatus
from storage.jobs import get_job
from storage.lost_runs import LiveRun, live_run, mark_lost
from storage.ownership import Run
from storage.runs import RunStatus, finish_run, heartbeat, start_run

logger = logging.getLogger(__name__)

LEASE_S = 30.0
HEARTBEAT_INTERVAL_S = 2.0


class RunLease:
    """A run's lease; `check` extends it, from any thread.

    What it learns goes to the stop signal: a cancelled job, a completion window that closed, a run that was
    taken over. A database that does not answer for a while is no reason to stop: the lease says when it is.
    """

    __slots__ = ("_db", "_run", "_stop")

    def __init__(self, db: Database, run: Run, stop: StopSignal) -> None:
        self._db = db
        self._run = run
        self._stop = stop

    def check(self) -> None:
        """Extends the lease once and looks at the job."""
        try:
            job = heartbeat(self._db, self._run, lease_s=LEASE_S)
        except StaleRunError:
            self._stop.request(StopReason.LOST)
        except StorageUnavailableError as error:
            logger.warning("Run %s could not extend its lease and tries again: %s", self._run.run_id, error)
        else:
            if job.status is JobStatus.CANCELLING:
                self._stop.request(StopReason.CANCELLED)
            elif job.is_overdue:
                self._stop.request(StopReason.EXPIRED)


def take_job(
    db: Database,
    job_id: str,
    *,
    engine: str,
    policy: str,
    progress: Progress,
    stop: StopSignal,
    wait_for_lease: bool,
) -> Run:
    """Starts a run of a job. The lease of a run whose process died on this machine counts for nothing; that
    of any other dead run is waited for, and one that is renewed is a live run's.

    Args:
        db: the platform's tables.
        job_id: the job.
        engine: name of the engine that serves the job, to be recorded.
        policy: the job's admission policy, to be recorded.
        progress: told what is waited for.
        stop: ends the wait.
        wait_for_lease: False raises at once.

    Raises:
        StorageError: the job has ended, or another run executes it; `ids["lease_left_s"]` is there then, and
            the message says which process holds the job.
        RunInterruptedError: the wait was ended.
    """
    deadline_s = time.monotonic() + LEASE_S + 5.0
    told = False
    while True:
        try:
            return start_run(
                db,
                job_id,
                engine=engine,
                policy=policy,
                details=holder_details(),
                lease_s=LEASE_S,
            )
        except StorageError as error:
            left_s = error.ids.get("lease_left_s")
            if not isinstance(left_s, int):
                raise
            if free_dead_run(db, job_id):
                continue
            live = live_run(db, job_id)
            if live is None:
                continue
            if not wait_for_lease or time.monotonic() + left_s > deadline_s:
                raise _held_by_another(live, job_id, left_s) from None
            if not told:
                progress.note(
                    f"{_holding(live, job_id)}. Waiting up to {left_s} s: the job is taken over unless that "
                    "run shows that it is alive."
                )
                told = True
            if stop.wait(min(float(left_s), 1.0)):
                raise RunInterruptedError(
                    f"The process was told to end before it ran job {job_id}; run it again.",
                    job_id=job_id,
                ) from None


def _held_by_another(live: LiveRun, job_id: str, lease_left_s: int) -> StorageError:
    return StorageError(
        f"{_holding(live, job_id)}, so it is at work. Follow it with `blend status {job_id}`; to run the job "
        "here, end that process first, then do this again.",
        job_id=job_id,
        run_id=live.run_id,
        lease_left_s=lease_left_s,
    )


def _holding(live: LiveRun, job_id: str) -> str:
    """Who holds the job and since when, without a full stop."""
    return (
        f"Job {job_id} has been held by {holder_text(live.details)} since "
        f"{live.started_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC (run {live.run_id}, last sign of life "
        f"{live.heartbeat_age_s:.0f} s ago)"
    )


def free_dead_run(db: Database, job_id: str) -> bool:
    """Writes off a job's run whose process died on this machine; returns whether there was one."""
    live = live_run(db, job_id)
    if live is None or not is_gone(live.details):
        return False
    mark_lost(db, live.run_id)
    return True


@contextmanager
def held_job(db: Database, run: Run, stop: StopSignal) -> Iterator[None]:
    """Keeps the run's lease through the block and writes down how the run ended."""
    try:
        lease = RunLease(db, run, stop)
        with Heartbeat(f"lease-{run.run_id}", HEARTBEAT_INTERVAL_S, lease.check):
            lease.check()
            yield
    except StaleRunError:
        # The run belongs to no one any more; there is nothing to write down.
        raise
    except RunInterruptedError as error:
        _write_off(db, run, RunStatus.CANCELLED, str(error))
        raise
    except BlendError as error:
        _write_off(db, run, RunStatus.FAILED, str(error))
        raise
    except BaseException as error:
        # The message of a foreign error may quote a prompt; its kind is enough here, the log has the rest.
        message = f"Unexpected {type(error).__name__}."
        if isinstance(error, Exception):
            _write_off(db, run, RunStatus.FAILED, message)
        else:
            _write_off_in_time(db, run, message, thread_end_s(error))
        raise
    through_outages(lambda: _end(db, run, stop), stop, logger.warning)


def _end(db: Database, run: Run, stop: StopSignal) -> None:
    """Ends a run that came to its end; one that was told to stop while it exported has done its work."""
    is_done = stop.reason is None or get_job(db, run.job_id).status is JobStatus.COMPLETED
    finish_run(db, run, RunStatus.SUCCEEDED if is_done else RunStatus.CANCELLED)


def _write_off(db: Database, run: Run, status: RunStatus, message: str) -> None:
    """Ends a run that failed. Where the database is away its lease ends it: why it failed says more."""
    try:
        finish_run(db, run, status, error_message=message)
    except StorageError as error:
        logger.warning("Run %s ends with its lease: %s", run.run_id, error)


def _write_off_in_time(db: Database, run: Run, message: str, limit_s: float | None) -> None:
    """The same of a run whose process is being ended, and will not wait for a database that hangs."""
    thread = threading.Thread(
        target=_write_off, args=(db, run, RunStatus.FAILED, message), name=f"finish-{run.run_id}", daemon=True
    )
    thread.start()
    thread.join(limit_s)
