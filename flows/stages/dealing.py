"""Requests change hands among the ranks of a run: dealt out, asked back, taken over, given up."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from blend_core.partition import SHARDS_PER_RANK
from blend_core.plan import Plan
from flows.job_source import JobSource
from flows.stages.cut import cut_for_ranks
from flows.stages.held_shards import HeldShards
from flows.stages.recalls import Recalls
from storage.database import Database
from storage.ownership import Run
from storage.shards import Lease, NewShard, deal_shards, release_expired, release_rank

LEASE_S = 60.0

# An engine answers between two steps. One that is silent for longer hangs or is very slow, and nobody waits
# for it: what it starts all the same may run twice.
RECALL_LIMIT_S = 5.0
AWAY_PAUSE_S = 5.0


class Dealing:
    """Which rank holds which requests, here and in the table `shard`; for one thread at a time.

    An engine may start whatever it has been given, at any moment, and is heard of a moment later. So it is
    asked for requests that another rank is to have, and they change hands when it has answered that they did
    not start. While the database is away nothing changes hands.

    Attributes:
        held: the shards.
        live: ranks that are not given up.
        changed: by rank whether it holds other requests than when it looked last.
    """

    __slots__ = (
        "_away_until_s",
        "_clock",
        "_db",
        "_low_s",
        "_num_ranks",
        "_recalls",
        "_run",
        "_silent",
        "_sources",
        "changed",
        "held",
        "live",
    )

    def __init__(self, db: Database, run: Run, num_ranks: int, clock: Callable[[], float]) -> None:
        """Nothing is dealt yet. `clock` tells how long an engine has not answered, and the database not."""
        self._db = db
        self._run = run
        self._num_ranks = num_ranks
        self._clock = clock
        self._low_s = 0.0
        self._sources: dict[int, JobSource] = {}
        self._recalls = Recalls()
        self._silent: set[int] = set()
        self._away_until_s = clock()
        self.held = HeldShards()
        self.live = frozenset(range(num_ranks))
        self.changed = [False] * num_ranks

    def deal(self, revision: int, part: Plan) -> None:
        """Cuts a part of the plan in force for the live ranks, out of the shards that it was in."""
        if self._num_ranks > 1:
            work_s = part.compute_s + part.memory_s
            self.held.estimate(dict(zip(part.seq.tolist(), work_s.tolist(), strict=True)))
            self._low_s = float(work_s.sum()) / (SHARDS_PER_RANK * len(self.live))
        self._move(revision, cut_for_ranks(part, sorted(self.live)))

    def hand_out(self, rank: int, source: JobSource, seqs: Iterable[int]) -> list[int]:
        """Requests are about to reach a rank's engine through a source: those of them that may."""
        self._sources[rank] = source
        return [
            seq for seq in seqs if self.held.holder(seq) == rank and not self._recalls.is_asked(rank, seq)
        ]

    def handed_back(self, rank: int) -> None:
        """The run of a rank's engine is over: nothing starts there by itself."""
        self._sources.pop(rank, None)
        self._recalls.settle(rank)
        self.is_heard(rank)

    def is_heard(self, rank: int) -> None:
        """A rank's engine has told something."""
        self._silent.discard(rank)

    def released(self, revision: int, rank: int, seqs: Sequence[int], kept: Sequence[int]) -> None:
        """A rank's engine has answered: what it gave up goes to those who wait for it."""
        free = set(seqs)
        settled = self._recalls.settle(rank, [*seqs, *kept])
        given = {taker: [seq for seq in asked if seq in free] for taker, asked in settled.items()}
        self._pass_on(revision, rank, given)

    def take_over(self, revision: int, rank: int) -> bool:
        """Gives a rank that has little left to start what has not started of another's shard.

        Returns whether it has that now. Where the other's engine is to give it back first, the rank has it
        some moments later.
        """
        self._wait_no_longer(revision)
        if self._recalls.is_awaited(rank):
            return False
        own_s = self.held.unstarted_s(rank)
        shard = None if own_s > self._low_s else self.held.to_take(rank, own_s)
        if shard is None:
            return False
        owner = shard.lease.rank
        seqs = [seq for seq in shard.unstarted if not self._recalls.is_asked(owner, seq)]
        return bool(seqs) and self.database_answers() and self._move(revision, [(rank, seqs)])

    def release_expired(self) -> None:
        """Frees shards whose lease has run out while others' have not."""
        self._release(release_expired(self._db, self._run))

    def give_up(self, rank: int) -> bool:
        """Frees what a rank holds, unless it is the last one; returns whether it did. Safe to repeat."""
        if self.live == {rank}:
            return False
        leases = release_rank(self._db, self._run, rank)
        self.live -= {rank}
        self._release(leases)
        return True

    def database_answers(self) -> bool:
        """Whether requests can change hands now; a database that is away is asked every few seconds."""
        if self._clock() < self._away_until_s:
            return False
        if self._db.is_away():
            self._away_until_s = self._clock() + AWAY_PAUSE_S
            return False
        return True

    def _move(self, revision: int, pieces: Sequence[tuple[int, Sequence[int]]]) -> bool:
        """Gives requests to ranks, at once or when the engine that has them lets go; whether any at once."""
        at_once: list[tuple[int, list[int]]] = []
        asked: dict[int, dict[int, int]] = {}
        for taker, seqs in pieces:
            free: list[int] = []
            for seq in seqs:
                owner = self.held.holder(seq)
                if owner is None or not self._is_to_be_asked(owner, taker, seq):
                    free.append(seq)
                else:
                    asked.setdefault(owner, {})[seq] = taker
            if free:
                at_once.append((taker, free))
        for owner, takers in asked.items():
            self._recalls.ask(owner, takers, self._clock())
            self._sources[owner].recall(takers)
        self._assign(revision, at_once)
        return bool(at_once)

    def _is_to_be_asked(self, owner: int, taker: int, seq: int) -> bool:
        """Whether a request may start on its owner's engine, or be on its way from there."""
        if self._recalls.is_asked(owner, seq):
            return True
        return owner != taker and owner in self._sources and owner not in self._silent

    def _wait_no_longer(self, revision: int) -> None:
        """Takes what engines that do not answer were asked for, as far as it is not known to have started."""
        for owner in self._recalls.overdue(self._clock() - RECALL_LIMIT_S):
            self._silent.add(owner)
            unstarted = set(self.held.unstarted)
            settled = self._recalls.settle(owner)
            given = {taker: [seq for seq in asked if seq in unstarted] for taker, asked in settled.items()}
            self._pass_on(revision, owner, given)

    def _pass_on(self, revision: int, owner: int, given: Mapping[int, Sequence[int]]) -> None:
        """Gives requests that cannot start on their owner's engine any more to those who wait for them."""
        pieces: list[tuple[int, list[int]]] = []
        for taker, seqs in given.items():
            if taker in self.live and taker != owner:
                theirs = [seq for seq in seqs if self.held.holder(seq) == owner]
                pieces += [(taker, piece) for piece in self._in_shards(theirs)]
        if pieces and self.database_answers():
            self._assign(revision, pieces)

    def _in_shards(self, seqs: Sequence[int]) -> list[list[int]]:
        """Pieces of about a shard's work."""
        pieces: list[list[int]] = []
        work_s = self._low_s
        for seq in seqs:
            if not pieces or work_s >= self._low_s:
                pieces.append([])
                work_s = 0.0
            pieces[-1].append(seq)
            work_s += self.held.work_s([seq])
        return pieces

    def _assign(self, revision: int, pieces: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Makes shards of requests for ranks, in the database and here."""
        if not pieces:
            return
        is_shared = self._num_ranks > 1
        shrunk = self.held.taken_from(seq for _, seqs in pieces for seq in seqs)
        new = [
            NewShard(rank, len(seqs), self.held.work_s(seqs) if is_shared else None) for rank, seqs in pieces
        ]
        leases = deal_shards(self._db, self._run, revision, new, lease_s=LEASE_S, shrunk=shrunk)
        self.held.assign([seqs for _, seqs in pieces], leases)
        for lease in [*leases, *(lease for lease, _ in shrunk)]:
            self.changed[lease.rank] = True

    def _release(self, leases: Sequence[Lease]) -> None:
        self.held.release(leases)
        for lease in leases:
            self.changed[lease.rank] = True
