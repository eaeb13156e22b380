"""What the ranks of a run share: the plan in force, and which rank holds which of its requests."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from blend_core.engines.base import RequestFailed, RequestFinished, StepWindow
from blend_core.plan import Plan
from flows.job_source import JobSource, pending_part
from flows.stages.context import JobContext
from flows.stages.dealing import Dealing
from flows.stages.plan_progress import PlanProgress
from flows.stages.replan import Replanner
from storage.recorder import Recorder
from storage.results import counts


class SharedPlan:
    """Deals a plan out to ranks, and what has not started on one that is behind to one that is idle.

    Every rank sees all that it holds from the start, as one plan: a policy that is fed shard by shard matches
    densities among a few shards only and is up to 40 % slower. How requests change hands is in `Dealing`.
    While the database is away they do not, and every rank works on with what it holds. Any thread may call
    anything.

    Attributes:
        num_ranks: ranks that the run began with.
        plan: the latest revision.
    """

    __slots__ = (
        "_context", "_dealing", "_error", "_is_deal_due", "_lock", "_num_ended", "_num_total", "_progress",
        "_recorder", "_replanner", "num_ranks", "plan",
    )  # fmt: skip

    def __init__(
        self,
        context: JobContext,
        recorder: Recorder,
        replanner: Replanner,
        plan: Plan,
        pending: Plan,
        num_ranks: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the latest revision of the plan and the part of it that has no result, and deals that out.

        `clock` tells rising seconds.

        Raises:
            StaleRunError: the run no longer owns the job.
        """
        self.num_ranks = num_ranks
        self.plan = plan
        self._context = context
        self._recorder = recorder
        self._replanner = replanner
        self._progress = {plan.revision: PlanProgress(plan, pending)}
        self._lock = threading.RLock()
        self._dealing = Dealing(context.wiring.database, context.run, num_ranks, clock)
        self._is_deal_due = False
        self._error: BaseException | None = None
        standing = counts(context.wiring.database, context.job_id)
        self._num_total = standing.total
        self._num_ended = standing.total - standing.pending
        self._dealing.deal(plan.revision, pending)

    @property
    def is_over(self) -> bool:
        """Whether every rank is to stop: the run is told to, or a rank failed in a way that ends it."""
        return self._error is not None or self._context.stop.reason is not None

    @property
    def is_done(self) -> bool:
        """Whether every request has ended."""
        return len(self._dealing.held) == 0

    @property
    def live_ranks(self) -> list[int]:
        """Ranks that are not given up. Waits for no lock: signs of life must not wait for a slow database."""
        return sorted(self._dealing.live)

    def requests_of(self, rank: int) -> list[int]:
        """Requests without an end that the rank holds."""
        with self._lock:
            return self._dealing.held.requests_of(rank)

    def holds(self, rank: int, seq: int) -> bool:
        """Whether a request is the rank's, and without an end."""
        return self._dealing.held.holder(seq) == rank

    def starting(self, rank: int) -> None:
        """A new run of the rank's engine begins: nothing is in flight there."""
        with self._lock:
            self._dealing.held.idle_again(rank)

    def hand_out(self, rank: int, source: JobSource, seqs: Iterable[int]) -> list[int]:
        """Requests are about to reach a rank's engine: those of them that may.

        From then on no other rank gets them before the engine, asked by its source, has given them back.
        """
        with self._lock:
            return self._dealing.hand_out(rank, source, seqs)

    def handed_back(self, rank: int) -> None:
        """The run of a rank's engine is over: what has not started there starts nowhere by itself."""
        with self._lock:
            self._dealing.handed_back(rank)

    def started(self, rank: int, seqs: Iterable[int]) -> None:
        """Requests are in flight on the rank's engine."""
        with self._lock:
            self._dealing.is_heard(rank)
            self._dealing.held.start(rank, seqs)

    def released(self, rank: int, seqs: Sequence[int], kept: Sequence[int]) -> None:
        """A rank's engine gave up requests that it was asked for, and kept those that had started."""
        with self._lock:
            self._dealing.is_heard(rank)
            self._dealing.released(self.plan.revision, rank, seqs, kept)

    def ended(self, rank: int, event: RequestFinished | RequestFailed) -> bool:
        """A request ended on a rank: records it, unless it is not the rank's any more; whether it was."""
        seq = event.seq
        with self._lock:
            if not self.holds(rank, seq):
                return False
            lease = self._dealing.held.end(seq)
            # Under the lock: what has ended here is with the recorder before its lease can be taken away.
            if isinstance(event, RequestFinished):
                self._recorder.finished(event, lease)
            else:
                self._recorder.failed(event, lease)
            self._replanner.ended(seq)
            for progress in self._progress.values():
                progress.ended(seq)
            self._num_ended += 1
            self.count()
            return True

    def count(self) -> None:
        """Tells how many requests have ended."""
        with self._lock:
            self._context.progress.counted(self._num_ended, self._num_total)

    def record_window(self, rank: int, window: StepWindow) -> None:
        """Records a window of a rank's engine and shows it."""
        with self._lock:
            planned_density = self._progress[window.revision].planned_density
            self._context.progress.window(window, rank)
        self._recorder.window(window, rank=rank, planned_density=planned_density)

    def take_change(self, rank: int) -> bool:
        """Whether what the rank holds, or the plan, has changed since the last call."""
        if not self._dealing.changed[rank]:
            return False
        # Before the caller looks: what changes after that is told once more.
        self._dealing.changed[rank] = False
        return True

    def revise(self) -> None:
        """Starts planning anew once the samples are there; puts a revision that is ready in force."""
        with self._lock:
            if self.is_over:
                return
            if self._replanner.is_due:
                self._replanner.start(self._recorder.flush)
            revised = self._replanner.take()
            dealing = self._dealing
            if revised is not None:
                self.plan = revised
                left = pending_part(revised, dealing.held.seqs)
                self._progress[revised.revision] = PlanProgress(revised, left)
                dealing.changed = [True] * self.num_ranks
                self._is_deal_due = self.num_ranks > 1
            if self._is_deal_due and dealing.database_answers():
                # What runs stays where it is; the rest is dealt anew, by what is known now.
                self._is_deal_due = False
                dealing.deal(self.plan.revision, pending_part(self.plan, dealing.held.unstarted))

    def take_over(self, rank: int) -> bool:
        """Gives a rank that has little left to start what has not started of another's shard.

        Returns whether it has that now. Where the other's engine is to give it back first, the rank has it
        some moments later.
        """
        if self.num_ranks == 1 or self.is_over:
            return False
        with self._lock:
            return self._dealing.take_over(self.plan.revision, rank)

    def release_expired(self) -> None:
        """Frees shards whose lease has run out, so that a rank may take them over."""
        with self._lock:
            if self._dealing.database_answers():
                # Committed under the old lease: nobody runs again what has ended.
                self._recorder.flush()
                self._dealing.release_expired()

    def give_up(self, rank: int) -> bool:
        """A rank runs nothing any more: the others may take what it holds. False where there is no other.

        Called by the rank itself, which ends nothing more; safe to repeat where the database was away.
        """
        # Committed under the old lease: nobody runs again what has ended.
        self._recorder.flush()
        with self._lock:
            return self._dealing.give_up(rank)

    def fail(self, error: BaseException) -> None:
        """Ends every rank: one met an error that is not its own."""
        self._error = self._error or error
