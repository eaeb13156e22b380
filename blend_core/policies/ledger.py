"""What a policy keeps about the requests of a plan: estimates, phases, and KV tokens held per side."""

from collections import deque
from collections.abc import Collection
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from blend_core.errors import PlanError
from blend_core.performance import compute_density
from blend_core.plan import Plan
from blend_core.policies.base import FOR_EVER, LEFT, RIGHT, Side


class Phase(IntEnum):
    """Where a request stands."""

    WAITING = 0
    PREEMPTED = 1
    PREFILLING = 2
    DECODING = 3
    FINISHED = 4


# By themselves: before Python 3.12 an enumeration's class takes ten times as long to look one up.
WAITING: Final = Phase.WAITING
PREEMPTED: Final = Phase.PREEMPTED
PREFILLING: Final = Phase.PREFILLING
DECODING: Final = Phase.DECODING
FINISHED: Final = Phase.FINISHED


class Ledger:
    """Requests by slot, and running totals that cost O(1) a step whatever is in flight.

    A slot is the request's number in order of first appearance; it stays when a plan is revised. KV tokens
    are those computed for a request: prompt tokens that came from the cache are charged to whoever computed
    them, and a decoding request holds one more after each step. A request that ends its prompt in a step
    grows from the next.

    Invariants checked by `check_integrity`:
        - `num_waiting` counts the slots in phase WAITING or PREEMPTED;
        - `num_running[side]`, `num_tokens[side]` equal the sums over the side's requests in flight.
    """

    __slots__ = (
        "_base_tokens",
        "_first_token_at",
        "_num_fresh",
        "_num_growing",
        "clock",
        "density",
        "num_kept_tokens",
        "num_prompt_tokens",
        "num_running",
        "num_shared_tokens",
        "num_tokens",
        "num_waiting",
        "output_tokens",
        "phase",
        "preempted",
        "seq",
        "side",
        "slot_of",
    )

    def __init__(self) -> None:
        self.clock = 0
        self.num_waiting = 0
        self.slot_of: dict[int, int] = {}
        self.seq: list[int] = []
        self.num_prompt_tokens: list[int] = []
        self.num_shared_tokens: list[int] = []
        self.output_tokens: list[float] = []
        self.density: list[float] = []
        self.phase: list[Phase] = []
        self.side: list[Side] = []
        self.num_kept_tokens: list[int] = []
        self._base_tokens: list[int] = []
        self._first_token_at: list[int] = []
        self.num_running = {LEFT: 0, RIGHT: 0}
        self.num_tokens = {LEFT: 0, RIGHT: 0}
        self._num_growing = {LEFT: 0, RIGHT: 0}
        self._num_fresh = {LEFT: 0, RIGHT: 0}
        self.preempted: dict[Side, deque[int]] = {LEFT: deque(), RIGHT: deque()}

    def take(self, plan: Plan) -> list[int]:
        """Adds the plan's requests or renews their estimates; returns its slots in planned order.

        Raises:
            PlanError: a request stands in the plan twice.
        """
        order: list[int] = []
        columns = (
            plan.seq.tolist(),
            plan.num_prompt_tokens.tolist(),
            plan.num_shared_tokens.tolist(),
            plan.estimated_output_tokens.tolist(),
            compute_density(plan.compute_s, plan.memory_s).tolist(),
        )
        for seq, prompt, shared, output, density in zip(*columns, strict=True):
            slot = self.slot_of.get(seq)
            if slot is None:
                slot = self._add(seq)
            self.num_prompt_tokens[slot] = prompt
            self.num_shared_tokens[slot] = shared
            self.output_tokens[slot] = max(1.0, output)
            self.density[slot] = density
            order.append(slot)
        if len(set(order)) != len(order):
            raise PlanError("A plan names a request twice; build the plan again.", revision=plan.revision)
        return order

    def _add(self, seq: int) -> int:
        slot = len(self.seq)
        self.slot_of[seq] = slot
        self.seq.append(seq)
        self.num_prompt_tokens.append(0)
        self.num_shared_tokens.append(0)
        self.output_tokens.append(1.0)
        self.density.append(0.0)
        self.phase.append(WAITING)
        self.side.append(LEFT)
        self.num_kept_tokens.append(0)
        self._base_tokens.append(0)
        self._first_token_at.append(FOR_EVER)
        self.num_waiting += 1
        return slot

    def is_waiting(self, slot: int) -> bool:
        """Whether the request is neither in flight nor finished."""
        phase = self.phase[slot]
        return phase is WAITING or phase is PREEMPTED

    def num_prefill_tokens(self, slot: int) -> int:
        """Tokens that must be in KV before the request decodes: its prompt and the output it kept."""
        return self.num_prompt_tokens[slot] + self.num_kept_tokens[slot]

    def num_output_tokens(self, slot: int) -> int:
        """Output tokens so far of a request in flight, those kept over a preemption included."""
        if self.phase[slot] is not DECODING:
            return self.num_kept_tokens[slot]
        grown = self.clock - self._first_token_at[slot]
        return self.num_kept_tokens[slot] + 1 + (grown if grown > 0 else 0)

    def output_tokens_so_far(self, slots: Collection[int]) -> npt.NDArray[np.float64]:
        """Returns `num_output_tokens` of many, `(num_slots,)`."""
        num_kept = np.fromiter(map(self.num_kept_tokens.__getitem__, slots), np.float64, len(slots))
        first_at = np.fromiter(map(self._first_token_at.__getitem__, slots), np.float64, len(slots))
        new = np.maximum(self.clock + 1.0 - first_at, 1.0)
        return num_kept + np.where(first_at < FOR_EVER, new, 0.0)

    def unshared_prompt_tokens(self, slots: Collection[int]) -> npt.NDArray[np.float64]:
        """Returns prompt tokens that each of many shares with none before it, `(num_slots,)`."""
        num_prompt = np.fromiter(map(self.num_prompt_tokens.__getitem__, slots), np.float64, len(slots))
        num_shared = np.fromiter(map(self.num_shared_tokens.__getitem__, slots), np.float64, len(slots))
        return num_prompt - num_shared

    def num_own_tokens(self, slot: int) -> int:
        """KV tokens that a request holds by itself when it starts: prompt tokens that it shares left out."""
        return self.num_prompt_tokens[slot] - self.num_shared_tokens[slot] + self.num_kept_tokens[slot]

    def num_held_tokens(self, slot: int) -> int:
        """KV tokens charged to a request in flight."""
        if self.phase[slot] is not DECODING:
            return self._base_tokens[slot]
        grown = self.clock - self._first_token_at[slot]
        return self._base_tokens[slot] + (grown if grown > 0 else 0)

    def admit(self, slot: int, side: Side, num_cached_tokens: int) -> int:
        """Puts a waiting request in flight; returns the tokens charged to its side."""
        if self.phase[slot] is PREEMPTED:
            self.preempted[self.side[slot]].remove(slot)
        charged = max(0, self.num_prefill_tokens(slot) - num_cached_tokens)
        self.phase[slot] = PREFILLING
        self.side[slot] = side
        self._base_tokens[slot] = charged
        self.num_waiting -= 1
        self.num_running[side] += 1
        self.num_tokens[side] += charged
        return charged

    def start_decoding(self, slot: int) -> None:
        """The request has its first new token; it grows from the next step on."""
        self.phase[slot] = DECODING
        self._first_token_at[slot] = self.clock + 1
        self._num_fresh[self.side[slot]] += 1

    def advance(self, num_steps: int) -> None:
        """Lets every request that was decoding before this step grow by `num_steps` tokens."""
        self.clock += num_steps
        for side in (LEFT, RIGHT):
            self.num_tokens[side] += self._num_growing[side] * num_steps
            self._num_growing[side] += self._num_fresh[side]
            self._num_fresh[side] = 0

    def finish(self, slot: int) -> bool:
        """Ends a request, in flight or waiting; returns whether it waited."""
        phase = self.phase[slot]
        if phase is FINISHED:
            return False
        waited = phase is WAITING or phase is PREEMPTED
        if phase is PREEMPTED:
            self.preempted[self.side[slot]].remove(slot)
        if waited:
            self.num_waiting -= 1
        else:
            self._leave(slot)
        self.phase[slot] = FINISHED
        return waited

    def preempt(self, slot: int) -> None:
        """Takes a request out of flight; it waits at the front of its side and keeps its output."""
        num_output_tokens = self.num_output_tokens(slot)
        self._leave(slot)
        self.num_kept_tokens[slot] = num_output_tokens
        self._first_token_at[slot] = FOR_EVER
        self.phase[slot] = PREEMPTED
        self.num_waiting += 1
        self.preempted[self.side[slot]].appendleft(slot)

    def move(self, slot: int, side: Side) -> None:
        """Puts a request in flight on the other side's account."""
        if self.side[slot] is side:
            return
        phase = self.phase[slot]
        held = self.num_held_tokens(slot)
        growing = self._first_token_at[slot] <= self.clock
        self._leave(slot)
        self.side[slot] = side
        self.num_running[side] += 1
        self.num_tokens[side] += held
        if phase is DECODING:
            if growing:
                self._num_growing[side] += 1
            else:
                self._num_fresh[side] += 1

    def _leave(self, slot: int) -> None:
        side = self.side[slot]
        self.num_tokens[side] -= self.num_held_tokens(slot)
        self.num_running[side] -= 1
        if self.phase[slot] is DECODING:
            if self._first_token_at[slot] <= self.clock:
                self._num_growing[side] -= 1
            else:
                self._num_fresh[side] -= 1

    def check_integrity(self) -> None:
        """Recounts every total request by request. Raises `AssertionError` where one differs."""
        waiting = (WAITING, PREEMPTED)
        assert self.num_waiting == sum(phase in waiting for phase in self.phase)
        for side in Side:
            in_flight = [
                slot
                for slot, phase in enumerate(self.phase)
                if phase in (PREFILLING, DECODING) and self.side[slot] is side
            ]
            assert self.num_running[side] == len(in_flight)
            assert self.num_tokens[side] == sum(map(self.num_held_tokens, in_flight))
