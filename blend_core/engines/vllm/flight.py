"""Requests in flight under vLLM's scheduler, and what each of its steps did. No vLLM here."""

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from blend_core.policies.base import Side


class ScheduledRequest(Protocol):
    """What is read of vLLM's `Request`."""

    request_id: str
    num_computed_tokens: int
    num_prompt_tokens: int
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and output tokens that are known."""

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that are known."""


class StepCounts(NamedTuple):
    """What a step computes, as `StepRecord` counts it.

    Attributes:
        completed: seqs whose prompt the step completes, in the order of their admission.
        num_prefill_tokens: prompt tokens, recomputation included.
        num_decode_tokens: output tokens that are not the first of an answer.
        num_recomputed_tokens: those of `num_prefill_tokens` that had been computed before a preemption.
        prefill_tokens_sq: sum over chunks of `(c + t)^2 - c^2`.
        decode_kv_tokens: KV tokens read by decoding.
        num_left_out: decoding requests of which it computes nothing.
    """

    completed: tuple[int, ...]
    num_prefill_tokens: int
    num_decode_tokens: int
    num_recomputed_tokens: int
    prefill_tokens_sq: int
    decode_kv_tokens: int
    num_left_out: int


class Flight:
    """Requests in flight, in sums that cost the same a step however many decode.

    A request's KV is counted from the scheduler's own `num_computed_tokens`, which vLLM moves on when it has
    scheduled a step. While decoding, it grows by one with every step: only where it began is kept. Where
    steps overlap, one may leave out decoding requests whose last tokens are on their way.

    Attributes:
        num_through: decoding requests of whose answers the latest step computes the last token that they may
            have: where steps overlap and each of them computes all that decode, the next one leaves them out.
        num_left: requests from the left side.
        num_promised_blocks: blocks that prompts in flight will take and vLLM, which allocates chunk by chunk,
            has not given.

    Invariants:
        - a request is either in the middle of its prompt or decoding;
        - the sums by side, over prompts and over decoding requests are those of the requests in flight.
    """

    __slots__ = (
        "_block_size",
        "_clock",
        "_kv_begin",
        "_kv_begin_sum",
        "_num_through_at",
        "_once_computed",
        "_prefilling",
        "_promised",
        "_requests",
        "_seq_of_id",
        "_through_at",
        "num_left",
        "num_promised_blocks",
        "num_through",
    )

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._clock = 0
        self.num_left = 0
        self.num_promised_blocks = 0
        self._requests: dict[int, tuple[ScheduledRequest, Side]] = {}
        self._seq_of_id: dict[str, int] = {}
        # Tokens computed of a prompt, and the blocks of `num_promised_blocks` that are its own.
        self._prefilling: dict[int, int] = {}
        self._promised: dict[int, int] = {}
        # KV tokens of a decoding request are this and the number of steps so far.
        self._kv_begin: dict[int, int] = {}
        self._kv_begin_sum = 0
        self._once_computed: dict[int, int] = {}
        # The step that computes the last token which a request may have, and of how many each one does.
        self.num_through = 0
        self._through_at: dict[int, int] = {}
        self._num_through_at: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, seq: int) -> bool:
        return seq in self._requests

    @property
    def num_decoding(self) -> int:
        """Requests whose prompt is complete."""
        return len(self._kv_begin)

    def admit(self, seq: int, request: ScheduledRequest, side: Side, num_cached_tokens: int) -> None:
        """The scheduler runs the request from now on, behind so many tokens from the cache."""
        self._requests[seq] = request, side
        self._seq_of_id[request.request_id] = seq
        self.num_left += side is Side.LEFT
        self._prefilling[seq] = num_cached_tokens
        promised = self._num_blocks_between(num_cached_tokens, request.num_tokens)
        self._promised[seq] = promised
        self.num_promised_blocks += promised

    def leave(self, seq: int) -> ScheduledRequest:
        """The request is in flight no more: it ended."""
        self._once_computed.pop(seq, None)
        return self._leave(seq)[0]

    def preempt(self, seq: int) -> Side:
        """The request lost its KV; what was computed is remembered, to be known as recomputation.

        Returns the side that it was on.
        """
        begin = self._kv_begin.get(seq)
        num_computed = self._prefilling[seq] if begin is None else begin + self._clock
        self._once_computed[seq] = max(num_computed, self._once_computed.get(seq, 0))
        return self._leave(seq)[1]

    def forget(self, seq: int) -> None:
        """The request ended while it waited."""
        self._once_computed.pop(seq, None)

    def was_admitted(self, seq: int) -> bool:
        """Whether a waiting request was in flight before a preemption."""
        return seq in self._once_computed

    def seqs_of(self, request_ids: Collection[str]) -> list[int]:
        """Seqs of those requests that are in flight, by vLLM's ids."""
        seq_of_id = self._seq_of_id
        return [seq_of_id[request_id] for request_id in request_ids if request_id in seq_of_id]

    def advance(self, num_scheduled_tokens: Mapping[str, int], total: int) -> StepCounts:
        """Counts a step that vLLM has scheduled, and moves on to the next.

        Args:
            num_scheduled_tokens: of each request that it computes anything of, by vLLM's ids.
            total: their sum.
        """
        self._clock += 1
        self.num_through += self._num_through_at.pop(self._clock, 0)
        num_chunks = num_prefill = num_recomputed = squares = num_final = 0
        num_decoding, num_left_out = len(self._kv_begin), len(self._requests) - len(num_scheduled_tokens)
        kv_tokens = self._kv_begin_sum + self._clock * num_decoding
        completed = []
        for seq, start in list(self._prefilling.items()):
            request = self._requests[seq][0]
            end, num_tokens = request.num_computed_tokens, request.num_tokens
            num_left_out -= end == start
            num_chunks += end - start
            if end < num_tokens:
                self._prefilling[seq] = end
                promised = self._num_blocks_between(end, num_tokens)
                self.num_promised_blocks += promised - self._promised[seq]
                self._promised[seq] = promised
            else:
                completed.append(seq)
                self._start_decoding(seq, end, request.max_tokens - request.num_output_tokens)
                if request.num_output_tokens:
                    # The last token of a prompt that is computed again is the one that it had decoded last.
                    num_final += 1
                    kv_tokens += end
                    end -= 1
            num_prefill += end - start
            squares += end * end - start * start
            num_recomputed += max(0, min(end, self._once_computed.get(seq, 0)) - start)
        if num_left_out:
            kv_tokens -= self._hold_back(num_scheduled_tokens)
        return StepCounts(
            tuple(completed),
            num_prefill,
            total - num_chunks + num_final,
            num_recomputed,
            squares,
            kv_tokens,
            num_left_out,
        )

    def _hold_back(self, num_scheduled_tokens: Mapping[str, int]) -> int:
        """Undoes the growth of requests that a step left out; returns the KV tokens counted for them."""
        num_tokens = 0
        for seq, begin in self._kv_begin.items():
            if self._requests[seq][0].request_id not in num_scheduled_tokens:
                num_tokens += begin + self._clock
                self._kv_begin[seq] = begin - 1
                self._kv_begin_sum -= 1
        return num_tokens

    def _start_decoding(self, seq: int, num_computed_tokens: int, num_left_tokens: int) -> None:
        del self._prefilling[seq]
        self.num_promised_blocks -= self._promised.pop(seq)
        begin = num_computed_tokens - self._clock
        self._kv_begin[seq] = begin
        self._kv_begin_sum += begin
        # This step computes the first of what is left.
        through_at = self._through_at[seq] = self._clock + num_left_tokens - 1
        if through_at <= self._clock:
            self.num_through += 1
        else:
            self._num_through_at[through_at] = self._num_through_at.get(through_at, 0) + 1

    def _leave(self, seq: int) -> tuple[ScheduledRequest, Side]:
        begin = self._kv_begin.pop(seq, None)
        if begin is None:
            del self._prefilling[seq]
            self.num_promised_blocks -= self._promised.pop(seq)
        else:
            self._kv_begin_sum -= begin
            through_at = self._through_at.pop(seq)
            if through_at <= self._clock:
                self.num_through -= 1
            else:
                self._num_through_at[through_at] -= 1
        request, side = left = self._requests.pop(seq)
        self.num_left -= side is Side.LEFT
        del self._seq_of_id[request.request_id]
        return left

    def _num_blocks_between(self, num_computed_tokens: int, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size) - -(-num_computed_tokens // self._block_size)

    def check_integrity(self) -> None:
        """Raises `AssertionError` where an invariant of the class does not hold."""
        assert self._prefilling.keys() | self._kv_begin.keys() == self._requests.keys(), "a phase is missing"
        assert not self._prefilling.keys() & self._kv_begin.keys(), "a request is in two phases"
        assert self._kv_begin_sum == sum(self._kv_begin.values()), "the sum of decoding KV is wrong"
        sides = [side for _, side in self._requests.values()]
        assert self.num_left == sides.count(Side.LEFT), "the number on the left side is wrong"
        through = sum(through_at <= self._clock for through_at in self._through_at.values())
        assert self._through_at.keys() == self._kv_begin.keys(), "a last step is missing"
        assert self.num_through == through, "the number of those that are through is wrong"
        promised = sum(
            self._num_blocks_between(num_computed, self._requests[seq][0].num_tokens)
            for seq, num_computed in self._prefilling.items()
        )
        assert self.num_promised_blocks == promised, "the sum of promised blocks is wrong"
