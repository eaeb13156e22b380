"""One run of a rank's engine over a part of what the rank holds, its events recorded as they come."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from blend_core.engines.base import (
    EngineEvent,
    RequestFailed,
    RequestFinished,
    RequestsAdmitted,
    RequestsReleased,
    StepWindow,
)
from blend_core.engines.process import EngineProcess
from blend_core.errors import EngineDiedError, StorageUnavailableError
from blend_core.request import Request
from flows.job_source import JobSource, pending_part
from flows.outage import Value, through_outages
from flows.stages.context import JobContext
from flows.stages.parts import Part
from flows.stages.shared_plan import SharedPlan
from flows.stages.stall_watch import StallWatch
from flows.stopping import StopReason
from storage.recorder import Recorder
from storage.request_shards import RequestShards
from storage.runs import set_run_details
from storage.suspects import pending_suspects

# How long an engine that is told to stop may say nothing: a job that was cancelled does not wait for a hang.
STOPPING_LIMIT_S = 30.0
# The same of an engine that still loads, and of a run that lost its job: what its engine could still tell may
# not be written, and the run that has the job waits for the device.
NOTHING_TO_TELL_S = 1.0


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What all ranks of a run use.

    Attributes:
        plan: which rank holds what.
        requests: token ids of the job's requests.
        recorder: takes results and windows.
    """

    plan: SharedPlan
    requests: RequestShards
    recorder: Recorder


class EngineRun:
    """A part of what a rank holds on its engine, from the first request to the last.

    A part that is under no suspicion grows by what the rank takes over meanwhile.

    Attributes:
        num_windows: windows of the rank so far, those of engines before this one included.
        num_answers: requests that got an answer in this one.
        in_flight: requests that started and have not ended, in the order of their start.
    """

    __slots__ = (
        "_added",
        "_context",
        "_is_suspect",
        "_is_withdrawn",
        "_open",
        "_plan",
        "_rank",
        "_recorder",
        "_requests",
        "_revision",
        "_source",
        "_taken",
        "_watch",
        "in_flight",
        "num_answers",
        "num_windows",
    )

    def __init__(
        self, context: JobContext, shared: SharedParts, rank: int, part: Part, first_batch_index: int
    ) -> None:
        """Takes requests that the rank holds, to run them by the plan in force."""
        shared.plan.starting(rank)
        plan = shared.plan.plan
        self._context = context
        self._rank = rank
        self._plan = shared.plan
        self._recorder = shared.recorder
        self._requests = shared.requests
        self._watch: StallWatch | None = None
        self._source = JobSource(pending_part(plan, part.seqs), self._fetch)
        self._revision = plan.revision
        self._is_suspect = part.is_suspect
        self._open = dict.fromkeys(part.seqs.tolist())
        self._added: set[int] = set()
        self._taken: set[int] = set()
        self._is_withdrawn = False
        self.in_flight: dict[int, None] = {}
        self.num_answers = 0
        self.num_windows = first_batch_index

    @property
    def num_left(self) -> int:
        """Requests that an engine which ended in peace has left without an end.

        What the rank took over when its engine was about to end is not among them: that is the next part's.
        """
        return sum(seq not in self._added for seq in self._open)

    def run(self, engine: EngineProcess) -> None:
        """Opens the engine if it is not open, and runs the part.

        Returns when every request has ended, or early when the context is told to stop; by then, and also
        when the engine died, everything that it told is committed.

        Raises:
            EngineDiedError: the engine ended, failed, or told nothing for too long.
            EngineStartError: it did not come up.
        """
        context = self._context
        limits = context.wiring.settings.engine
        self._open_engine(engine, limits.start_limit_s)
        # Opening takes long: others may have taken over meanwhile what was to start here.
        self._follow()
        given = set(self._plan.hand_out(self._rank, self._source, self._open))
        self._withdraw([seq for seq in self._open if seq not in given])
        try:
            if not self._plan.is_over and self._open:
                self._run_open(engine)
        finally:
            self._plan.handed_back(self._rank)

    def _run_open(self, engine: EngineProcess) -> None:
        watch = StallWatch(self._silence_limit_s, engine.kill, time.monotonic)
        self._watch = watch
        try:
            with watch:
                self._plan.count()
                for event in watch.watched(engine.run(self._source)):
                    self._take(event)
                    self._follow()
        except EngineDiedError as error:
            self._recorder.flush()
            raise _hung(watch, error, "BLEND_ENGINE__STALL_LIMIT_S if its steps take as long") from error
        self._recorder.flush()

    def _fetch(self, seqs: Sequence[int]) -> Sequence[Request]:
        """Requests for the engine, which waits in mid-run while the object store is away.

        Raises:
            StorageUnavailableError: it is away for too long, or while the run ends.
        """

        def fetch() -> Sequence[Request] | StorageUnavailableError:
            if self._watch is not None:
                self._watch.excuse()
            try:
                return self._requests.fetch(seqs)
            except StorageUnavailableError as error:
                if self._plan.is_over:
                    return error
                raise

        fetched = self._through_outages(fetch)
        if isinstance(fetched, StorageUnavailableError):
            raise fetched
        return fetched

    def _through_outages(self, work: Callable[[], Value]) -> Value:
        return through_outages(work, self._context.stop, self._context.progress.note)

    def _open_engine(self, engine: EngineProcess, limit_s: float) -> None:
        if engine.pid is not None:
            return
        # One that loads has nothing to tell: a run that is to end does not wait for it.
        watch = StallWatch(
            lambda: min(limit_s, NOTHING_TO_TELL_S) if self._plan.is_over else limit_s,
            engine.kill,
            time.monotonic,
        )
        try:
            with watch, watch.waiting():
                info = engine.open()
        except EngineDiedError as error:
            raise _hung(watch, error, "BLEND_ENGINE__START_LIMIT_S if it loads for as long") from error
        details = {**info.details, "num_ranks": str(self._plan.num_ranks)}
        database = self._context.wiring.database
        self._through_outages(lambda: set_run_details(database, self._context.run, details))

    def _silence_limit_s(self) -> float:
        limit_s = self._context.wiring.settings.engine.stall_limit_s
        if self._context.stop.reason is StopReason.LOST:
            return min(limit_s, NOTHING_TO_TELL_S)
        return min(limit_s, STOPPING_LIMIT_S) if self._plan.is_over else limit_s

    def _take(self, event: EngineEvent) -> None:
        match event:
            case RequestsAdmitted():
                started = [seq for seq in event.seqs if seq in self._open]
                self.in_flight.update(dict.fromkeys(started))
                self._plan.started(self._rank, started)
            case RequestsReleased():
                self._forget(event.seqs)
                self._plan.released(self._rank, event.seqs, event.kept)
            case RequestFinished():
                self.num_answers += self._ended(event)
            case RequestFailed():
                self._ended(event)
            case StepWindow():
                # An engine counts its windows from 0; on the rank they go on where the engine before stopped.
                self._plan.record_window(self._rank, replace(event, batch_index=self.num_windows))
                self.num_windows += 1
            case _:
                assert_never(event)

    def _ended(self, event: RequestFinished | RequestFailed) -> bool:
        """Records an end; False where another rank has taken the request over."""
        self._open.pop(event.seq, None)
        self.in_flight.pop(event.seq, None)
        return self._plan.ended(self._rank, event)

    def _follow(self) -> None:
        """Heeds a stop, and what has changed of the plan and of what the rank holds."""
        if self._plan.is_over:
            if not self._is_withdrawn:
                self._is_withdrawn = True
                self._source.withdraw(sorted(self._open))
            return
        self._plan.revise()
        if not self._is_suspect:
            self._plan.take_over(self._rank)
        if self._plan.take_change(self._rank):
            self._take_change()

    def _take_change(self) -> None:
        held = dict.fromkeys(self._plan.requests_of(self._rank))
        self._withdraw([seq for seq in self._open if seq not in held])
        if self._is_suspect:
            return
        more = [seq for seq in held if seq not in self._open and seq not in self._taken]
        if more:
            database, job_id = self._context.wiring.database, self._context.job_id
            suspects = self._through_outages(lambda: pending_suspects(database, job_id))
            apart = {suspect.seq for suspect in suspects}
            more = [seq for seq in more if seq not in apart]
            more = self._plan.hand_out(self._rank, self._source, more)
            self._open.update(dict.fromkeys(more))
            self._added.update(more)
        plan = self._plan.plan
        if self._open and (more or plan.revision > self._revision):
            self._revision = plan.revision
            self._source.revise(pending_part(plan, list(self._open)))

    def _withdraw(self, seqs: Sequence[int]) -> None:
        """Takes requests, those in flight included, from the engine: they are another rank's."""
        self._forget(seqs)
        self._source.withdraw(seqs)

    def _forget(self, seqs: Iterable[int]) -> None:
        """Requests are not the engine's any more. It never runs again what it was to drop: what comes back is
        the next part's."""
        for seq in seqs:
            self._open.pop(seq, None)
            self.in_flight.pop(seq, None)
            self._taken.add(seq)


def _hung(watch: StallWatch, error: EngineDiedError, what_to_raise: str) -> EngineDiedError:
    """The same error, or one that says why the engine was killed where it was for its silence."""
    if watch.silent_s is None:
        return error
    return EngineDiedError(
        f"The engine told nothing for {watch.silent_s:.0f} s and was ended by SIGKILL; its unfinished "
        f"requests run again. Raise {what_to_raise}."
    )
