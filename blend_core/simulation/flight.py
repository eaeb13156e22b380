"""The requests in flight of a simulation: lengths, growth, ends and preemptions, by row."""

from collections.abc import Iterable
from heapq import heappop, heappush

from blend_core.policies.base import FOR_EVER, Side
from blend_core.simulation.kv_cache import KvCache
from blend_core.simulation.prompts import PromptBlocks


class Flight:
    """Counts what is in flight in totals, so that a step costs the same whatever their number.

    Time is the number of steps executed, `clock`. A request that completes its prompt in a step holds its
    prefill tokens after it, and one token more after each step that follows; it ends with the step that makes
    its last output token. At most one prompt is incomplete at a time: prompts are prefilled in order of
    admission, and the next is admitted only when the step has budget left.

    Attributes:
        clock: steps executed.
        num_running: requests in flight.
        num_decoding: requests in flight whose prompt is complete.
        num_running_by_side: requests in flight by the side they were admitted from.
        decode_kv_tokens: KV tokens that decoding requests hold.
        growth: by clock modulo block size, decoding requests that need a block for the step from then on.
        prefilling: row of the incomplete prompt.
        num_computed_tokens: tokens of the incomplete prompt that are in the cache.
    """

    __slots__ = (
        "_admissions",
        "_cache",
        "_end_clocks",
        "_ends",
        "_grows_from",
        "_life",
        "_num_computed_before",
        "_num_kept_tokens",
        "_num_output_tokens",
        "_num_prompt_tokens",
        "_side",
        "clock",
        "decode_kv_tokens",
        "growth",
        "num_computed_tokens",
        "num_decoding",
        "num_running",
        "num_running_by_side",
        "prefilling",
    )

    def __init__(self, prompts: PromptBlocks, output_tokens: Iterable[int], cache: KvCache) -> None:
        self._cache = cache
        self._num_prompt_tokens: list[int] = prompts.num_prompt_tokens.tolist()
        self._num_output_tokens = [max(1, int(length)) for length in output_tokens]
        num_rows = len(self._num_prompt_tokens)
        # None: not in flight.
        self._side: list[Side | None] = [None] * num_rows
        # Admissions and departures so far: tells a live entry of a queue from a stale one.
        self._life = [0] * num_rows
        self._num_kept_tokens = [0] * num_rows
        self._num_computed_before = [0] * num_rows
        self._grows_from = [0] * num_rows
        self._admissions: list[tuple[int, int]] = []
        self.growth = [0] * cache.block_size
        self._ends: dict[int, list[tuple[int, int]]] = {}
        self._end_clocks: list[int] = []
        self.clock = 0
        self.num_running = 0
        self.num_decoding = 0
        self.num_running_by_side = {Side.LEFT: 0, Side.RIGHT: 0}
        self.decode_kv_tokens = 0
        self.prefilling: int | None = None
        self.num_computed_tokens = 0

    @property
    def num_growing_blocks(self) -> int:
        """Blocks that decoding requests need for the next step."""
        return self.growth[self.clock % len(self.growth)]

    @property
    def next_end(self) -> int:
        """Clock at which the next request may end; far away where nothing decodes."""
        return self._end_clocks[0] if self._end_clocks else self.clock + FOR_EVER

    def is_running(self, row: int) -> bool:
        """Whether the request is in flight."""
        return self._side[row] is not None

    def num_prefill_tokens(self, row: int) -> int:
        """Tokens to be in the cache before the request decodes: its prompt and the output it kept."""
        return self._num_prompt_tokens[row] + self._num_kept_tokens[row]

    def num_output_tokens(self, row: int) -> int:
        """Output tokens so far."""
        if self._side[row] is None or row == self.prefilling:
            return self._num_kept_tokens[row]
        return self._num_kept_tokens[row] + 1 + self.clock - self._grows_from[row]

    def admit(self, row: int, side: Side) -> int | None:
        """Puts a request in flight; returns its cached tokens, None (unchanged) where it does not fit."""
        assert self.prefilling is None
        num_cached_tokens = self._cache.allocate(row, self.num_prefill_tokens(row))
        if num_cached_tokens is None:
            return None
        self._life[row] += 1
        self._side[row] = side
        self._admissions.append((row, self._life[row]))
        self.num_running += 1
        self.num_running_by_side[side] += 1
        self.prefilling = row
        self.num_computed_tokens = num_cached_tokens
        return num_cached_tokens

    def prefill(self, num_tokens: int) -> int:
        """Computes a chunk of the incomplete prompt; returns how many tokens were computed once before."""
        row = self.prefilling
        assert row is not None
        before = min(self._num_computed_before[row], self.num_computed_tokens + num_tokens)
        num_recomputed = max(0, before - self.num_computed_tokens)
        self.num_computed_tokens += num_tokens
        if self.num_computed_tokens == self.num_prefill_tokens(row):
            self.prefilling = None
            self._cache.complete_prompt()
        return num_recomputed

    def step(self, completed: Iterable[int]) -> list[int]:
        """Ends a step: decoding requests grow, those whose prompt was completed begin to; returns the rows
        that end.

        The caller has taken the blocks to grow into. Rows that end are still in flight.
        """
        self.clock += 1
        self.decode_kv_tokens += self.num_decoding
        for row in completed:
            self._start_decoding(row)
        return self._ended()

    def jump(self, num_steps: int) -> list[int]:
        """Does what as many calls of `step` without a completed prompt do; none may end before the last."""
        self.clock += num_steps
        self.decode_kv_tokens += self.num_decoding * num_steps
        return self._ended()

    def _ended(self) -> list[int]:
        ended: list[int] = []
        while self._end_clocks and self._end_clocks[0] <= self.clock:
            entries = self._ends.pop(heappop(self._end_clocks))
            ended.extend(row for row, life in entries if life == self._life[row])
        return ended

    def preempt_last(self) -> int:
        """Takes the request admitted last out of flight, its output kept; returns its row."""
        while True:
            row, life = self._admissions.pop()
            if life == self._life[row]:
                break
        num_output_tokens = self.num_output_tokens(row)
        computed = self.num_computed_tokens if row == self.prefilling else self._num_held_tokens(row)
        self._num_computed_before[row] = max(self._num_computed_before[row], computed)
        self.leave(row)
        self._num_kept_tokens[row] = num_output_tokens
        return row

    def leave(self, row: int) -> None:
        """Takes a request out of flight and frees its blocks."""
        side = self._side[row]
        assert side is not None
        self.num_running -= 1
        self.num_running_by_side[side] -= 1
        if row == self.prefilling:
            self._cache.release(row, self.num_computed_tokens)
            self.prefilling = None
        else:
            held = self._num_held_tokens(row)
            self._cache.release(row, held)
            self.num_decoding -= 1
            self.decode_kv_tokens -= held
            self.growth[self._growth_place(row)] -= 1
        self._side[row] = None
        self._life[row] += 1

    def _start_decoding(self, row: int) -> None:
        self._grows_from[row] = self.clock
        self.num_decoding += 1
        self.decode_kv_tokens += self.num_prefill_tokens(row)
        self.growth[self._growth_place(row)] += 1
        end = self.clock + self._num_output_tokens[row] - self._num_kept_tokens[row] - 1
        if end not in self._ends:
            self._ends[end] = []
            heappush(self._end_clocks, end)
        self._ends[end].append((row, self._life[row]))

    def _num_held_tokens(self, row: int) -> int:
        return self.num_prefill_tokens(row) + self.clock - self._grows_from[row]

    def _growth_place(self, row: int) -> int:
        return (self._grows_from[row] - self.num_prefill_tokens(row)) % len(self.growth)


class StepPrefill:
    """The prompt tokens of one step.

    Attributes:
        num_tokens: tokens computed.
        num_tokens_sq: sum over chunks of `(c + t)^2 - c^2`, `t` tokens after `c` earlier ones.
        num_recomputed_tokens: those that had been computed before a preemption.
        completed: rows whose prompt the step completes.
    """

    __slots__ = ("completed", "num_recomputed_tokens", "num_tokens", "num_tokens_sq")

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_tokens_sq = 0
        self.num_recomputed_tokens = 0
        self.completed: list[int] = []

    def add_chunk(self, flight: Flight, budget: int) -> int:
        """Computes as much of the incomplete prompt as the budget allows; returns the number of tokens."""
        row, before = flight.prefilling, flight.num_computed_tokens
        assert row is not None
        num_tokens = min(budget, flight.num_prefill_tokens(row) - before)
        self.num_tokens += num_tokens
        self.num_tokens_sq += (before + num_tokens) ** 2 - before**2
        self.num_recomputed_tokens += flight.prefill(num_tokens)
        if flight.prefilling is None:
            self.completed.append(row)
        return num_tokens
