"""Which rank holds which requests, and what an idle rank may take from one that is behind."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from storage.shards import Lease


@dataclass(slots=True)
class HeldShard:
    """A shard of a run.

    Attributes:
        lease: what its results are written under.
        open: its requests without an end.
        in_flight: those of them that run on its rank's engine.
        unstarted_s: estimated work of the others.
        is_held: whether a rank works on it.
    """

    lease: Lease
    open: dict[int, None]
    in_flight: set[int]
    unstarted_s: float
    is_held: bool = True

    @property
    def unstarted(self) -> list[int]:
        """Its requests that do not run."""
        return [seq for seq in self.open if seq not in self.in_flight]


class HeldShards:
    """The shards of a run in this process; for one thread at a time.

    Work is `compute_s + memory_s` of requests by the plan. Of a run with one rank, where nothing can be taken
    over, it is not kept.

    Invariants:
        - every request without an end is in one shard;
        - no shard is empty.
    """

    __slots__ = ("_shard_of", "_shards", "_work_s")

    def __init__(self) -> None:
        """Holds nothing yet."""
        # In the order in which they were cut; a dict, since they leave from anywhere.
        self._shards: dict[int, HeldShard] = {}
        self._shard_of: dict[int, HeldShard] = {}
        self._work_s: dict[int, float] = {}

    @property
    def seqs(self) -> list[int]:
        """Requests without an end."""
        return list(self._shard_of)

    @property
    def unstarted(self) -> list[int]:
        """Those of them that run nowhere."""
        return [seq for seq, shard in self._shard_of.items() if seq not in shard.in_flight]

    def __len__(self) -> int:
        return len(self._shard_of)

    def estimate(self, work_s: Mapping[int, float]) -> None:
        """Takes the estimated work of requests, in seconds."""
        self._work_s.update(work_s)
        for shard in self._shards.values():
            shard.unstarted_s = self.work_s(shard.unstarted)

    def work_s(self, seqs: Iterable[int]) -> float:
        """Estimated work of requests."""
        return sum(self._work_s.get(seq, 0.0) for seq in seqs)

    def requests_of(self, rank: int) -> list[int]:
        """Requests without an end that a rank holds."""
        return [seq for shard in self._held_by(rank) for seq in shard.open]

    def holder(self, seq: int) -> int | None:
        """The rank that holds a request without an end."""
        shard = self._shard_of.get(seq)
        return shard.lease.rank if shard is not None and shard.is_held else None

    def idle_again(self, rank: int) -> None:
        """Nothing runs on a rank's engine."""
        for shard in self._held_by(rank):
            shard.unstarted_s += self.work_s(shard.in_flight)
            shard.in_flight.clear()

    def start(self, rank: int, seqs: Iterable[int]) -> None:
        """Requests run on a rank's engine; those that the rank does not hold any more are left out."""
        for seq in seqs:
            if self.holder(seq) == rank:
                shard = self._shard_of[seq]
                shard.in_flight.add(seq)
                shard.unstarted_s -= self._work_s.get(seq, 0.0)

    def end(self, seq: int) -> Lease:
        """A request ended: the lease to record that under."""
        shard = self._shard_of[seq]
        self._leave(seq)
        return shard.lease

    def taken_from(self, seqs: Iterable[int]) -> list[tuple[Lease, int]]:
        """The leases that requests are under, and how many under each."""
        counts: dict[int, tuple[Lease, int]] = {}
        for seq in seqs:
            shard = self._shard_of.get(seq)
            if shard is not None:
                counts[id(shard)] = (shard.lease, counts.get(id(shard), (shard.lease, 0))[1] + 1)
        return list(counts.values())

    def assign(self, pieces: Sequence[Sequence[int]], leases: Sequence[Lease]) -> None:
        """Requests are in new shards, and not in those that they were in."""
        for seqs, lease in zip(pieces, leases, strict=True):
            shard = HeldShard(lease, dict.fromkeys(seqs), set(), self.work_s(seqs))
            for seq in seqs:
                if seq in self._shard_of:
                    self._leave(seq)
                self._shard_of[seq] = shard
            self._shards[id(shard)] = shard

    def release(self, leases: Iterable[Lease]) -> None:
        """Shards wait for a rank, under leases of a higher number; nothing of them runs any more."""
        waiting = {(lease.revision, lease.shard_index): lease for lease in leases}
        for shard in self._shards.values():
            lease = waiting.get((shard.lease.revision, shard.lease.shard_index))
            if lease is not None:
                shard.lease, shard.is_held = lease, False
                shard.unstarted_s += self.work_s(shard.in_flight)
                shard.in_flight.clear()

    def unstarted_s(self, rank: int) -> float:
        """Work that a rank holds and has not started."""
        return sum(shard.unstarted_s for shard in self._held_by(rank))

    def to_take(self, rank: int, own_s: float) -> HeldShard | None:
        """The shard of which a rank that has `own_s` of work to start is to take what has not started.

        One that waits, the largest first; else one of the rank that has most to start, as long as that has
        more than the idle rank will have then: so nothing goes to and fro.
        """
        waiting = [shard for shard in self._shards.values() if not shard.is_held]
        if waiting:
            return max(waiting, key=lambda shard: shard.unstarted_s)
        left_s = {
            other: self.unstarted_s(other)
            for other in {shard.lease.rank for shard in self._shards.values()} - {rank}
        }
        if not left_s:
            return None
        behind = max(left_s, key=lambda other: (left_s[other], other))
        fitting = [
            shard
            for shard in self._held_by(behind)
            if len(shard.open) > len(shard.in_flight) and left_s[behind] > own_s + shard.unstarted_s
        ]
        return max(fitting, key=lambda shard: shard.unstarted_s, default=None)

    def _held_by(self, rank: int) -> list[HeldShard]:
        return [shard for shard in self._shards.values() if shard.is_held and shard.lease.rank == rank]

    def _leave(self, seq: int) -> None:
        shard = self._shard_of.pop(seq)
        del shard.open[seq]
        if seq in shard.in_flight:
            shard.in_flight.remove(seq)
        else:
            shard.unstarted_s -= self._work_s.get(seq, 0.0)
        if not shard.open:
            del self._shards[id(shard)]
