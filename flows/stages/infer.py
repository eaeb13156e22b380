"""The infer stage: one engine after another until every request of the plan has a result."""

import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import assert_never

from blend_core.engines.base import EngineEvent, RequestFailed, RequestFinished, StepWindow
from blend_core.engines.process import EngineProcess
from blend_core.errors import EngineDiedError, EngineError
from blend_core.plan import Plan
from flows.device_lock import device_lock
from flows.job_source import JobSource, pending_part
from flows.stages.context import JobContext
from flows.stages.plan_progress import PlanProgress
from flows.stages.replan import Replanner
from flows.stages.stall_watch import StallWatch
from storage.plans import load_plan
from storage.recorder import Recorder
from storage.request_shards import RequestShards
from storage.results import counts, pending_seqs
from storage.runs import set_run_details

MAX_ENGINE_RESTARTS = 3
STALL_LIMIT_S = 300.0

logger = logging.getLogger(__name__)


def infer_job(context: JobContext) -> str:
    """Runs what has no result yet and records it; returns the outcome in one line.

    One engine at a time works on a device: this waits for an engine run of another job, whoever started it.
    An engine that dies is started again, up to `MAX_ENGINE_RESTARTS` times, with what was in flight. Returns
    early, with requests left, when the context is told to stop.

    Raises:
        EngineStartError: the engine did not come up.
        EngineDiedError: it died once too often.
        StaleRunError: another run took the job over.
        StorageError: results cannot be recorded.
    """
    wiring = context.wiring
    device = f"{os.uname().nodename}:{wiring.settings.engine.device}"
    with device_lock(
        wiring.database,
        device=device,
        job_id=context.job_id,
        stop=context.stop,
        waiting=context.progress.note,
    ) as held:
        if held:
            with RequestShards(wiring.objects, context.job_id) as shards:
                _run_until_done(context, shards)
    standing = counts(wiring.database, context.job_id)
    return f"{standing.succeeded:,} succeeded, {standing.errored:,} errored, {standing.pending:,} left"


def _run_until_done(context: JobContext, shards: RequestShards) -> None:
    database = context.wiring.database
    num_windows = 0
    num_deaths = 0
    while context.stop.reason is None:
        pending = pending_seqs(database, context.job_id)
        if len(pending) == 0:
            return
        plan = load_plan(database, context.wiring.objects, context.job_id)
        engine_run = EngineRun(context, shards, plan, pending_part(plan, pending), num_windows)
        try:
            engine_run.run(context.wiring.engine(context.spec))
        except EngineDiedError as error:
            num_deaths += 1
            if num_deaths > MAX_ENGINE_RESTARTS:
                raise
            context.progress.note(
                f"{error} Starting it again ({num_deaths} of {MAX_ENGINE_RESTARTS}); "
                "requests that were in flight run again."
            )
        else:
            _check_nothing_left(context)
        num_windows = engine_run.num_windows


def _kill(engine: EngineProcess) -> None:
    """Ends an engine that hangs; its reader is told of a dead engine then."""
    pid = engine.pid
    if pid is not None:
        logger.warning("The engine process %d told nothing for %.0f s and is killed.", pid, STALL_LIMIT_S)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _check_nothing_left(context: JobContext) -> None:
    """An engine that ends in peace has ended every request, unless it was told to stop."""
    num_left = len(pending_seqs(context.wiring.database, context.job_id))
    if num_left and context.stop.reason is None:
        raise EngineError(
            f"The engine ended and left {num_left} requests of job {context.job_id} without a result; "
            "run the job again, and report this if it stays so.",
            job_id=context.job_id,
        )


class EngineRun:
    """One engine from open to close, its events recorded as they come.

    Attributes:
        num_windows: windows of this run so far, those of engines before this one included.
    """

    __slots__ = (
        "_context",
        "_num_total",
        "_open",
        "_progress_by_revision",
        "_replanner",
        "_source",
        "_withdrawn",
        "num_windows",
    )

    def __init__(
        self,
        context: JobContext,
        shards: RequestShards,
        plan: Plan,
        pending: Plan,
        first_batch_index: int,
    ) -> None:
        """Takes the latest revision of the job's plan and the part of it that is still to run."""
        self._context = context
        self._source = JobSource(pending, shards.fetch)
        self._progress_by_revision = {plan.revision: PlanProgress(plan, pending)}
        self._replanner = Replanner(context, shards, plan, pending)
        self._num_total = counts(context.wiring.database, context.job_id).total
        self._open = set(pending.seq.tolist())
        self._withdrawn = False
        self.num_windows = first_batch_index

    def run(self, engine: EngineProcess) -> None:
        """Opens the engine, runs what is pending and closes the engine, whatever happens.

        Returns when every request has ended, or early when the context is told to stop; by then everything
        that the engine told is committed.
        """
        database, run = self._context.wiring.database, self._context.run
        try:
            info = engine.open()
            set_run_details(database, run, info.details)
            with (
                Recorder(database, self._context.wiring.objects, run) as recorder,
                self._replanner,
                StallWatch(STALL_LIMIT_S, partial(_kill, engine), time.monotonic) as watch,
            ):
                self._count()
                for event in watch.watched(engine.run(self._source)):
                    self._take(event, recorder)
                    self._heed_stop()
                    self._revise(recorder)
        finally:
            engine.close()

    def _take(self, event: EngineEvent, recorder: Recorder) -> None:
        match event:
            case RequestFinished():
                recorder.finished(event)
                self._ended(event.seq)
            case RequestFailed():
                recorder.failed(event)
                self._ended(event.seq)
            case StepWindow():
                self._take_window(event, recorder)
            case _:
                assert_never(event)

    def _ended(self, seq: int) -> None:
        self._open.discard(seq)
        self._replanner.ended(seq)
        for plan_progress in self._progress_by_revision.values():
            plan_progress.ended(seq)
        self._count()

    def _take_window(self, window: StepWindow, recorder: Recorder) -> None:
        # An engine counts its windows from 0; in the run they go on where the engine before stopped.
        window = replace(window, batch_index=self.num_windows)
        self.num_windows += 1
        planned_density = self._progress_by_revision[window.revision].planned_density
        recorder.window(window, rank=0, planned_density=planned_density)
        self._context.progress.window(window)

    def _heed_stop(self) -> None:
        if self._context.stop.reason is not None and not self._withdrawn:
            self._withdrawn = True
            self._source.withdraw(sorted(self._open))

    def _revise(self, recorder: Recorder) -> None:
        """Starts planning anew once the samples are there, and hands a finished revision to the engine."""
        if self._replanner.is_due and not self._withdrawn:
            recorder.flush()
            self._replanner.start()
        revised = self._replanner.take()
        if revised is not None:
            still_open = pending_part(revised, list(self._open))
            self._progress_by_revision[revised.revision] = PlanProgress(revised, still_open)
            self._source.revise(still_open)

    def _count(self) -> None:
        self._context.progress.counted(self._num_total - len(self._open), self._num_total)
