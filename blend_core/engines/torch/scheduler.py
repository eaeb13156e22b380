"""Which rows a step computes: decoding first, then prompts under way, then what the policy admits."""

from collections.abc import Callable
from dataclasses import dataclass

from blend_core.engines.torch.block_pool import BlockPool
from blend_core.engines.torch.sequence import Sequence
from blend_core.policies.base import AdmissionPolicy, EngineLimits, Side


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What a step computes.

    Attributes:
        decodes: requests with one token each.
        prefills: requests with a piece of their prompt: how many tokens.
        admitted: seqs among them that were never in flight before, in the order of their admission.
        num_cached_tokens: prompt tokens that first admissions found in the cache.
        num_preempted: requests that lost their blocks to make room.
    """

    decodes: list[Sequence]
    prefills: list[tuple[Sequence, int]]
    admitted: list[int]
    num_cached_tokens: int
    num_preempted: int


class Scheduler:
    """Requests at hand, their blocks, and the policy's say over them. It is the policy's `EngineView`.

    Invariants (`check_integrity`):
        - those of the block pool;
        - each block's references are those of the requests in flight;
        - a request in flight has blocks for every computed token, a waiting one has none.
    """

    def __init__(self, policy: AdmissionPolicy, limits: EngineLimits, clock: Callable[[], float]) -> None:
        """Starts empty.

        Args:
            policy: decides admissions.
            limits: of the engine.
            clock: seconds since the epoch, for `started_at`.
        """
        self._policy = policy
        self._limits = limits
        self._clock = clock
        self._pool = BlockPool(limits.num_blocks)
        self._waiting: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._revision = 0

    @property
    def num_free_blocks(self) -> int:
        """See `EngineView`."""
        return self._pool.num_free

    @property
    def num_running(self) -> int:
        """See `EngineView`."""
        return len(self._running)

    @property
    def num_decoding(self) -> int:
        """See `EngineView`."""
        return sum(sequence.is_decoding for sequence in self._running.values())

    def num_held_blocks(self, seq: int) -> int:
        """See `EngineView`."""
        sequence = self._waiting.get(seq)
        if sequence is None:
            return 0
        cached = self._cached_blocks(sequence)
        return len(cached) - self._pool.num_idle(cached)

    def is_ready(self, seq: int) -> bool:
        """See `EngineView`."""
        return seq in self._waiting

    @property
    def kv_usage(self) -> float:
        """Share of blocks that requests in flight refer to."""
        return 1 - self._pool.num_free / self._pool.num_blocks

    def num_running_on(self, side: Side) -> int:
        """Requests in flight from a side."""
        return sum(sequence.side is side for sequence in self._running.values())

    def num_output_tokens(self, seq: int) -> int:
        """Tokens of the answer so far of a request at hand."""
        return (self._running.get(seq) or self._waiting[seq]).num_output_tokens

    def knows(self, seq: int) -> bool:
        """Whether the request is at hand, waiting or in flight."""
        return seq in self._waiting or seq in self._running

    def add(self, sequence: Sequence) -> None:
        """Puts a fetched request at hand."""
        self._waiting[sequence.seq] = sequence

    def keep_only(self, seqs: set[int]) -> None:
        """Lets go of waiting requests outside `seqs` that have no answer begun; they can be fetched again."""
        self._waiting = {
            seq: sequence
            for seq, sequence in self._waiting.items()
            if seq in seqs or sequence.started_at is not None
        }

    def set_revision(self, revision: int) -> None:
        """Plan revision that admissions from now on are marked with."""
        self._revision = revision

    def schedule(self) -> ScheduledStep:
        """Decides the next step and takes the blocks it needs. Empty when nothing may run now.

        Whole blocks that the step fills are offered to the prefix cache at once: the step writes a layer's KV
        before any row of it attends, so a request admitted in the same step may read them.
        """
        num_preempted = self._make_room_for_decoding()
        decodes = [sequence for sequence in self._running.values() if sequence.is_decoding]
        budget = min(self._policy.begin_step(self), self._limits.max_num_batched_tokens - len(decodes))
        if not decodes:
            # A step without decoding would be empty under a budget of 0, and so would every later one.
            budget = max(budget, 1)
        prefills: list[tuple[Sequence, int]] = []
        for sequence in self._running.values():
            if not sequence.is_decoding and budget > 0:
                budget -= self._add_chunk(prefills, sequence, budget)
        first_admitted: list[int] = []
        num_cached_tokens = 0
        while budget > 0 and len(self._running) < self._limits.max_num_seqs:
            admitted = self._admit_next()
            if admitted is None:
                break
            if not admitted.num_once_computed_tokens:
                first_admitted.append(admitted.seq)
                num_cached_tokens += admitted.num_cached_tokens
            budget -= self._add_chunk(prefills, admitted, budget)
        for sequence in decodes:
            self._name_blocks(sequence, 1)
        return ScheduledStep(decodes, prefills, first_admitted, num_cached_tokens, num_preempted)

    def _make_room_for_decoding(self) -> int:
        """Gives decoding requests their next block; preempts the latest admitted where none is left."""
        num_preempted = 0
        for sequence in list(self._running.values()):
            if not sequence.is_decoding:
                continue
            if len(sequence.token_ids) <= len(sequence.block_ids) * self._limits.block_size:
                continue
            while not self._pool.num_free:
                latest = next(reversed(self._running.values()))
                self._preempt(latest)
                num_preempted += 1
                if latest is sequence:
                    break
            else:
                sequence.block_ids += self._pool.allocate(1)
        return num_preempted

    def _preempt(self, sequence: Sequence) -> None:
        self._pool.release(sequence.block_ids)
        sequence.lose_blocks()
        del self._running[sequence.seq]
        self._waiting[sequence.seq] = sequence
        self._policy.preempted(sequence.seq)

    def _admit_next(self) -> Sequence | None:
        """Places the request that the policy names; None when it names none or there is no room for it."""
        admission = self._policy.next_request(self)
        sequence = self._waiting.get(admission.seq) if admission else None
        if admission is None or sequence is None:
            return None
        block_size = self._limits.block_size
        cached = self._cached_blocks(sequence)
        num_new = -(-len(sequence.token_ids) // block_size) - len(cached)
        if num_new + self._pool.num_idle(cached) > self._pool.num_free:
            return None
        self._pool.take(cached)
        sequence.block_ids = cached + self._pool.allocate(num_new)
        sequence.num_computed_tokens = len(cached) * block_size
        sequence.num_named_blocks = len(cached)
        sequence.side = admission.side
        if sequence.started_at is None:
            sequence.started_at = self._clock()
            sequence.revision = self._revision
            sequence.num_cached_tokens = sequence.num_computed_tokens
        del self._waiting[sequence.seq]
        self._running[sequence.seq] = sequence
        self._policy.admitted(sequence.seq, admission.side, sequence.num_computed_tokens)
        return sequence

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """Cached blocks of a waiting request: never all of its tokens, as its last one must be computed."""
        num_blocks = (len(sequence.token_ids) - 1) // self._limits.block_size
        return self._pool.match(sequence.chain(self._limits.block_size, num_blocks))

    def _add_chunk(self, prefills: list[tuple[Sequence, int]], sequence: Sequence, budget: int) -> int:
        num_tokens = min(sequence.num_uncomputed_tokens, budget)
        prefills.append((sequence, num_tokens))
        self._name_blocks(sequence, num_tokens)
        return num_tokens

    def _name_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        num_whole = (sequence.num_computed_tokens + num_tokens) // self._limits.block_size
        if num_whole > sequence.num_named_blocks:
            chain = sequence.chain(self._limits.block_size, num_whole)
            for index in range(sequence.num_named_blocks, num_whole):
                self._pool.register(sequence.block_ids[index], chain[index])
            sequence.num_named_blocks = num_whole

    def drop(self, seq: int, num_output_tokens: int = 0) -> None:
        """Ends a request, in flight, waiting or not even fetched: frees its blocks and tells the policy.

        `num_output_tokens` are those of its answer, if it has one.
        """
        sequence = self._running.pop(seq, None)
        if sequence is not None:
            self._pool.release(sequence.block_ids)
        else:
            self._waiting.pop(seq, None)
        self._policy.finished(seq, num_output_tokens)

    def discard(self, seq: int) -> None:
        """Ends a request in flight whose KV is not to be trusted: `drop`, and nobody reuses its blocks."""
        self._pool.forget(self._running[seq].block_ids)
        self.drop(seq)

    def check_integrity(self) -> None:
        """Raises `AssertionError` where an invariant of the class does not hold."""
        self._pool.check_integrity()
        references: dict[int, int] = {}
        for sequence in self._running.values():
            capacity = len(sequence.block_ids) * self._limits.block_size
            assert sequence.num_computed_tokens <= capacity, f"request {sequence.seq} has too few blocks"
            for block in sequence.block_ids:
                references[block] = references.get(block, 0) + 1
        assert all(not sequence.block_ids for sequence in self._waiting.values()), (
            "a waiting request has blocks"
        )
        assert references == self._pool.references(), "references and requests in flight differ"
