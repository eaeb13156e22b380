"""What the ranks of a run share: the plan in force, and which rank holds which of its requests."""

import threading
from collections.abc import Iterable, Sequence

from blend_core.engines.base import RequestFailed, RequestFinished, StepWindow
from blend_core.plan import Plan
from flows.job_source import pending_part
from flows.stages.context import JobContext
from flows.stages.cut import SHARDS_PER_RANK, cut_for_ranks
from flows.stages.held_shards import HeldShards
from flows.stages.plan_progress import PlanProgress
from flows.stages.replan import Replanner
from storage.recorder import Recorder
from storage.results import counts
from storage.shards import Lease, NewShard, deal_shards, release_expired, release_rank

LEASE_S = 60.0


class SharedPlan:
    """Deals a plan out to ranks, and what has not started on one that is behind to one that is idle.

    Every rank sees all that it holds from the start, as one plan: a policy that is fed shard by shard matches
    densities among a few shards only and is up to 40 % slower. Any thread may call anything.

    Attributes:
        num_ranks: ranks that the run began with.
        plan: the latest revision.
    """

    __slots__ = (
        "_changed", "_context", "_error", "_held", "_live", "_lock", "_low_s", "_num_ended", "_num_total",
        "_progress", "_recorder", "_replanner", "num_ranks", "plan",
    )  # fmt: skip

    def __init__(
        self,
        context: JobContext,
        recorder: Recorder,
        replanner: Replanner,
        plan: Plan,
        pending: Plan,
        num_ranks: int,
    ) -> None:
        """Takes the latest revision of the plan and the part of it that has no result, and deals that out.

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
        self._live = frozenset(range(num_ranks))
        self._held = HeldShards()
        self._changed = [False] * num_ranks
        self._low_s = 0.0
        self._error: BaseException | None = None
        standing = counts(context.wiring.database, context.job_id)
        self._num_total = standing.total
        self._num_ended = standing.total - standing.pending
        self._deal(pending)

    @property
    def is_over(self) -> bool:
        """Whether every rank is to stop: the run is told to, or a rank failed in a way that ends it."""
        return self._error is not None or self._context.stop.reason is not None

    @property
    def is_done(self) -> bool:
        """Whether every request has ended."""
        return len(self._held) == 0

    @property
    def live_ranks(self) -> list[int]:
        """Ranks that are not given up. Waits for no lock: signs of life must not wait for a slow database."""
        return sorted(self._live)

    def requests_of(self, rank: int) -> list[int]:
        """Requests without an end that the rank holds."""
        with self._lock:
            return self._held.requests_of(rank)

    def holds(self, rank: int, seq: int) -> bool:
        """Whether a request is the rank's, and without an end."""
        return self._held.holder(seq) == rank

    def starting(self, rank: int) -> None:
        """A new run of the rank's engine begins: nothing is in flight there."""
        with self._lock:
            self._held.idle_again(rank)

    def started(self, rank: int, seqs: Iterable[int]) -> None:
        """Requests are in flight on the rank's engine."""
        with self._lock:
            self._held.start(rank, seqs)

    def ended(self, rank: int, event: RequestFinished | RequestFailed) -> bool:
        """A request ended on a rank: records it, unless it is not the rank's any more; whether it was."""
        seq = event.seq
        with self._lock:
            if not self.holds(rank, seq):
                return False
            lease = self._held.end(seq)
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
        if not self._changed[rank]:
            return False
        # Before the caller looks: what changes after that is told once more.
        self._changed[rank] = False
        return True

    def revise(self) -> None:
        """Starts planning anew once the samples are there; puts a revision that is ready in force."""
        with self._lock:
            if self._replanner.is_due and not self.is_over:
                self._recorder.flush()
                self._replanner.start()
            revised = self._replanner.take()
            if revised is None or self.is_over:
                return
            self.plan = revised
            self._progress[revised.revision] = PlanProgress(revised, pending_part(revised, self._held.seqs))
            if self.num_ranks > 1:
                # What runs stays where it is; the rest is dealt anew, by what is known now.
                self._deal(pending_part(revised, self._held.unstarted))
            self._changed = [True] * self.num_ranks

    def take_over(self, rank: int) -> bool:
        """Gives a rank that has little left to start what has not started of another's shard; whether it
        did."""
        if self.num_ranks == 1 or self.is_over:
            return False
        with self._lock:
            own_s = self._held.unstarted_s(rank)
            shard = None if own_s > self._low_s else self._held.to_take(rank, own_s)
            if shard is None:
                return False
            owner = shard.lease.rank
            self._assign([(rank, shard.unstarted)])
            self._changed[rank] = self._changed[owner] = True
            return True

    def release_expired(self) -> None:
        """Frees shards whose lease has run out, so that a rank may take them over."""
        with self._lock:
            # Committed under the old lease: nobody runs again what has ended.
            self._recorder.flush()
            self._release(release_expired(self._context.wiring.database, self._context.run))

    def give_up(self, rank: int) -> bool:
        """A rank runs nothing any more: the others may take what it holds. False where there is no other."""
        with self._lock:
            if self._live == {rank}:
                return False
            self._recorder.flush()
            self._live -= {rank}
            self._release(release_rank(self._context.wiring.database, self._context.run, rank))
            return True

    def fail(self, error: BaseException) -> None:
        """Ends every rank: one met an error that is not its own."""
        self._error = self._error or error

    def _deal(self, part: Plan) -> None:
        """Cuts a part of the plan in force for the live ranks, out of the shards that it was in."""
        if self.num_ranks > 1:
            work_s = part.compute_s + part.memory_s
            self._held.estimate(dict(zip(part.seq.tolist(), work_s.tolist(), strict=True)))
            self._low_s = float(work_s.sum()) / (SHARDS_PER_RANK * len(self._live))
        self._assign(cut_for_ranks(part, sorted(self._live)))

    def _assign(self, pieces: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Makes shards of requests for ranks, in the database and here."""
        is_shared = self.num_ranks > 1
        new = [
            NewShard(rank, len(seqs), self._held.work_s(seqs) if is_shared else None) for rank, seqs in pieces
        ]
        leases = deal_shards(
            self._context.wiring.database,
            self._context.run,
            self.plan.revision,
            new,
            lease_s=LEASE_S,
            shrunk=self._held.taken_from(seq for _, seqs in pieces for seq in seqs),
        )
        self._held.assign([seqs for _, seqs in pieces], leases)

    def _release(self, leases: Sequence[Lease]) -> None:
        self._held.release(leases)
        for lease in leases:
            self._changed[lease.rank] = True
