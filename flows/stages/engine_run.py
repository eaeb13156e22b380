"""One run of an opened engine over a part of a job, its events recorded as they come."""

import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import assert_never

from blend_core.engines.base import EngineEvent, RequestFailed, RequestFinished, RequestsAdmitted, StepWindow
from blend_core.engines.process import EngineProcess
from blend_core.errors import EngineDiedError
from blend_core.plan import Plan
from flows.job_source import JobSource, pending_part
from flows.stages.context import JobContext
from flows.stages.plan_progress import PlanProgress
from flows.stages.replan import Replanner
from flows.stages.stall_watch import StallWatch
from storage.recorder import Recorder
from storage.request_shards import RequestShards
from storage.results import counts
from storage.runs import set_run_details

# How long an engine that is told to stop may say nothing: a job that was cancelled does not wait for a hang.
STOPPING_LIMIT_S = 30.0

logger = logging.getLogger(__name__)


class EngineRun:
    """A part of a plan on an engine, from the first request to the last.

    Attributes:
        num_windows: windows of the job's run so far, those of engines before this one included.
        num_answers: requests that got an answer in this one.
        in_flight: requests that started and have not ended, in the order of their start.
    """

    __slots__ = (
        "_context",
        "_num_ended_before",
        "_num_total",
        "_open",
        "_progress_by_revision",
        "_replanner",
        "_source",
        "_withdrawn",
        "in_flight",
        "num_answers",
        "num_windows",
    )

    def __init__(
        self,
        context: JobContext,
        shards: RequestShards,
        plan: Plan,
        part: Plan,
        first_batch_index: int,
        *,
        may_replan: bool,
    ) -> None:
        """Takes the latest revision of the job's plan and the part of it that is to run now."""
        self._context = context
        self._source = JobSource(part, shards.fetch)
        self._progress_by_revision = {plan.revision: PlanProgress(plan, part)}
        self._replanner = Replanner(context, shards, plan, part) if may_replan else None
        standing = counts(context.wiring.database, context.job_id)
        self._num_total = standing.total
        self._num_ended_before = standing.total - standing.pending
        self._open = dict.fromkeys(part.seq.tolist())
        self._withdrawn = False
        self.in_flight: dict[int, None] = {}
        self.num_answers = 0
        self.num_windows = first_batch_index

    @property
    def num_open(self) -> int:
        """Requests of the part that have not ended."""
        return len(self._open)

    def run(self, engine: EngineProcess) -> None:
        """Opens the engine if it is not open, and runs the part.

        Returns when every request has ended, or early when the context is told to stop; by then, and also
        when this raises, everything that the engine told is committed.

        Raises:
            EngineDiedError: the engine ended, failed, or told nothing for too long.
            EngineStartError: it did not come up.
        """
        context = self._context
        limits = context.wiring.settings.engine
        self._open_engine(engine, limits.start_limit_s)
        watch = StallWatch(self._silence_limit_s, partial(_kill, engine), time.monotonic)
        with Recorder(context.wiring.database, context.wiring.objects, context.run) as recorder:
            try:
                if self._replanner is None:
                    self._take_all(engine, watch, recorder)
                else:
                    with self._replanner:
                        self._take_all(engine, watch, recorder)
            except EngineDiedError as error:
                raise _hung(watch, error) from error

    def _open_engine(self, engine: EngineProcess, limit_s: float) -> None:
        if engine.pid is not None:
            return
        watch = StallWatch(lambda: limit_s, partial(_kill, engine), time.monotonic)
        try:
            with watch, watch.waiting():
                info = engine.open()
        except EngineDiedError as error:
            raise _hung(watch, error) from error
        set_run_details(self._context.wiring.database, self._context.run, info.details)

    def _silence_limit_s(self) -> float:
        limit_s = self._context.wiring.settings.engine.stall_limit_s
        return limit_s if self._context.stop.reason is None else min(limit_s, STOPPING_LIMIT_S)

    def _take_all(self, engine: EngineProcess, watch: StallWatch, recorder: Recorder) -> None:
        with watch:
            self._count()
            for event in watch.watched(engine.run(self._source)):
                self._take(event, recorder)
                self._heed_stop()
                self._revise(recorder)

    def _take(self, event: EngineEvent, recorder: Recorder) -> None:
        match event:
            case RequestsAdmitted():
                self.in_flight.update(dict.fromkeys(event.seqs))
            case RequestFinished():
                recorder.finished(event)
                self.num_answers += 1
                self._ended(event.seq)
            case RequestFailed():
                recorder.failed(event)
                self._ended(event.seq)
            case StepWindow():
                self._take_window(event, recorder)
            case _:
                assert_never(event)

    def _ended(self, seq: int) -> None:
        self._open.pop(seq, None)
        self.in_flight.pop(seq, None)
        if self._replanner is not None:
            self._replanner.ended(seq)
        for plan_progress in self._progress_by_revision.values():
            plan_progress.ended(seq)
        self._num_ended_before += 1
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
        if self._replanner is None:
            return
        if self._replanner.is_due and not self._withdrawn:
            recorder.flush()
            self._replanner.start()
        revised = self._replanner.take()
        if revised is not None:
            still_open = pending_part(revised, list(self._open))
            self._progress_by_revision[revised.revision] = PlanProgress(revised, still_open)
            self._source.revise(still_open)

    def _count(self) -> None:
        self._context.progress.counted(self._num_ended_before, self._num_total)


def _kill(engine: EngineProcess) -> None:
    """Ends an engine that hangs; its reader is told of a dead engine then."""
    pid = engine.pid
    if pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _hung(watch: StallWatch, error: EngineDiedError) -> EngineDiedError:
    """The same error, or one that says why the engine was killed where it was for its silence."""
    if watch.silent_s is None:
        return error
    return EngineDiedError(
        f"The engine told nothing for {watch.silent_s:.0f} s and was ended by SIGKILL; its unfinished "
        "requests run again. Raise BLEND_ENGINE__STALL_LIMIT_S if its steps take as long."
    )
