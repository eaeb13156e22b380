"""Requests in flight under vLLM's scheduler, and what each of its steps did. No vLLM here."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from blend_core.policies.base import LEFT, Side


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
        num_prefill_tokens: prompt tokens, recomputation included.
        num_decode_tokens: output tokens that are not the first of an answer.
        num_recomputed_tokens: those of `num_prefill_tokens` that had been computed before a preemption.
        prefill_tokens_sq: sum over chunks of `(c + t)^2 - c^2`.
        decode_kv_tokens: KV tokens read by decoding.
        num_left_out: decoding requests of which it computes nothing.
    """

    num_prefill_tokens: int
    num_decode_tokens: int
    num_recomputed_tokens: int
    prefill_tokens_sq: int
    decode_kv_tokens: int
    num_left_out: int


class _InFlight:
    """One request, and what is kept of it.

    Attributes:
        num_computed_tokens: of its prompt, until that is complete.
        num_promised_blocks: blocks of `Flight.num_promised_blocks` that are its own.
        kv_begin: while it decodes, its KV tokens are this and the number of steps so far; None before.
        through_at: the step that computes the last token which it may have, once it decodes.
    """

    __slots__ = (
        "kv_begin",
        "num_computed_tokens",
        "num_promised_blocks",
        "request",
        "seq",
        "side",
        "through_at",
    )

    def __init__(
        self,
        seq: int,
        request: ScheduledRequest,
        side: Side,
        num_computed_tokens: int,
        num_promised_blocks: int,
    ) -> None:
        self.seq = seq
        self.request = request
        self.side = side
        self.num_computed_tokens = num_computed_tokens
        self.num_promised_blocks = num_promised_blocks
        self.kv_begin: int | None = None
        self.through_at = 0


class Flight:
    """Requests in flight, in sums that cost the same a step however many decode.

    A request's KV is counted from the scheduler's own `num_computed_tokens`, which vLLM moves on when it has
    scheduled a step. While decoding, it grows by one with every step: only where it began is kept. Where
    steps overlap, one may leave out decoding requests whose last tokens are on their way.

    Attributes:
        by_seq: requests in flight by `seq`; only looked at from outside.
        num_decoding: requests whose prompt is complete.
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
        "_by_id",
        "_clock",
        "_kv_begin_sum",
        "_num_through_at",
        "_once_computed",
        "_prefilling",
        "by_seq",
        "num_decoding",
        "num_left",
        "num_promised_blocks",
        "num_through",
    )

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._clock = 0
        self.by_seq: dict[int, _InFlight] = {}
        self._by_id: dict[str, _InFlight] = {}
        self._prefilling: dict[int, _InFlight] = {}
        self._once_computed: dict[int, int] = {}
        self._kv_begin_sum = 0
        self.num_decoding = self.num_left = self.num_promised_blocks = self.num_through = 0
        # Of how many requests each step ahead computes the last token that they may have.
        self._num_through_at: dict[int, int] = {}

    def admit(self, seq: int, request: ScheduledRequest, side: Side, num_cached_tokens: int) -> bool:
        """The scheduler runs the request from now on, behind so many tokens from the cache.

        Returns whether it does so for the first time.
        """
        promised = self._num_blocks_between(num_cached_tokens, request.num_tokens)
        one = _InFlight(seq, request, side, num_cached_tokens, promised)
        self.by_seq[seq] = self._by_id[request.request_id] = self._prefilling[seq] = one
        self.num_left += side is LEFT
        self.num_promised_blocks += promised
        return not self.was_admitted(seq)

    def leave(self, seq: int) -> ScheduledRequest:
        """The request is in flight no more: it ended."""
        if self._once_computed:
            self._once_computed.pop(seq, None)
        return self._leave(seq).request

    def preempt(self, seq: int) -> Side:
        """The request lost its KV; what was computed is remembered, to be known as recomputation.

        Returns the side that it was on.
        """
        one = self._leave(seq)
        num_computed = one.num_computed_tokens if one.kv_begin is None else one.kv_begin + self._clock
        self._once_computed[seq] = max(num_computed, self._once_computed.get(seq, 0))
        return one.side

    def forget(self, seq: int) -> None:
        """The request ended while it waited."""
        self._once_computed.pop(seq, None)

    def was_admitted(self, seq: int) -> bool:
        """Whether a waiting request was in flight before a preemption."""
        return seq in self._once_computed

    def seqs_of(self, request_ids: Collection[str]) -> list[int]:
        """Seqs of those requests that are in flight, by vLLM's ids."""
        by_id = self._by_id
        return [by_id[request_id].seq for request_id in request_ids if request_id in by_id]

    def advance(
        self, num_scheduled_tokens: Mapping[str, int], total: int
    ) -> tuple[Sequence[int], StepCounts]:
        """Counts a step that vLLM has scheduled, and moves on to the next.

        Returns the seqs whose prompt it completes, in the order of their admission, and the counts.

        Args:
            num_scheduled_tokens: of each request that it computes anything of, by vLLM's ids.
            total: their sum.
        """
        self._clock += 1
        self.num_through += self._num_through_at.pop(self._clock, 0)
        num_chunks = num_prefill = num_recomputed = squares = num_final = 0
        num_left_out = len(self.by_seq) - len(num_scheduled_tokens)
        kv_tokens = self._kv_begin_sum + self._clock * self.num_decoding
        completed = []
        for seq, one in list(self._prefilling.items()):
            request, start = one.request, one.num_computed_tokens
            end, num_tokens = request.num_computed_tokens, request.num_tokens
            num_left_out -= end == start
            num_chunks += end - start
            if end < num_tokens:
                one.num_computed_tokens = end
                promised = self._num_blocks_between(end, num_tokens)
                self.num_promised_blocks += promised - one.num_promised_blocks
                one.num_promised_blocks = promised
            else:
                completed.append(seq)
                self._start_decoding(one, end, request.max_tokens - request.num_output_tokens)
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
        num_decode = total - num_chunks + num_final
        return completed, StepCounts(
            num_prefill, num_decode, num_recomputed, squares, kv_tokens, num_left_out
        )

    def _hold_back(self, num_scheduled_tokens: Mapping[str, int]) -> int:
        """Undoes the growth of requests that a step left out; returns the KV tokens counted for them."""
        num_tokens = 0
        for request_id, one in self._by_id.items():
            if one.kv_begin is not None and request_id not in num_scheduled_tokens:
                num_tokens += one.kv_begin + self._clock
                one.kv_begin -= 1
                self._kv_begin_sum -= 1
        return num_tokens

    def _start_decoding(self, one: _InFlight, num_computed_tokens: int, num_left_tokens: int) -> None:
        del self._prefilling[one.seq]
        self.num_promised_blocks -= one.num_promised_blocks
        begin = one.kv_begin = num_computed_tokens - self._clock
        self._kv_begin_sum += begin
        self.num_decoding += 1
        # This step computes the first of what is left.
        through_at = one.through_at = self._clock + num_left_tokens - 1
        if through_at <= self._clock:
            self.num_through += 1
        else:
            self._num_through_at[through_at] = self._num_through_at.get(through_at, 0) + 1

    def _leave(self, seq: int) -> _InFlight:
        one = self.by_seq.pop(seq)
        del self._by_id[one.request.request_id]
        self.num_left -= one.side is LEFT
        if one.kv_begin is None:
            del self._prefilling[seq]
            self.num_promised_blocks -= one.num_promised_blocks
            return one
        self._kv_begin_sum -= one.kv_begin
        self.num_decoding -= 1
        if one.through_at <= self._clock:
            self.num_through -= 1
        else:
            self._num_through_at[one.through_at] -= 1
        return one

    def _num_blocks_between(self, num_computed_tokens: int, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size) - -(-num_computed_tokens // self._block_size)

    def check_integrity(self) -> None:
        """Raises `AssertionError` where an invariant of the class does not hold."""
        flight = self.by_seq.values()
        assert [one.request.request_id for one in flight] == list(self._by_id), (
            "the ids are not those in flight"
        )
        decoding = [one for one in flight if one.kv_begin is not None]
        prefilling = [one.seq for one in flight if one.kv_begin is None]
        assert prefilling == list(self._prefilling), "a request is in two phases or in none"
        assert self.num_decoding == len(decoding), "the number of decoding requests is wrong"
        kv_begin_sum = sum(one.kv_begin for one in decoding if one.kv_begin is not None)
        assert self._kv_begin_sum == kv_begin_sum, "the sum of decoding KV is wrong"
        assert self.num_left == sum(one.side is LEFT for one in flight), (
            "the number on the left side is wrong"
        )
        through = sum(one.through_at <= self._clock for one in decoding)
        assert self.num_through == through, "the number of those that are through is wrong"
        promised = sum(
            self._num_blocks_between(one.num_computed_tokens, one.request.num_tokens)
            for one in self._prefilling.values()
        )
        assert self.num_promised_blocks == promised, "the sum of promised blocks is wrong"
