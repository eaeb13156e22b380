"""What every policy of this package shares: phases of requests, cursors over the plan, and the room rule."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from blend_core.errors import PlanError
from blend_core.plan import Plan
from blend_core.policies.base import AdmissionPolicy, EngineLimits, EngineView, Side
from blend_core.policies.ledger import WAITING, Ledger

ADMISSIBLE_KV_SHARE: Final = 0.95
"""A prompt is admitted while it fits this share of KV; the rest is for decoding requests to grow. The setting
of our studies has it for every policy that does not look ahead."""


class QueuedPolicy(AdmissionPolicy):
    """Keeps the queue; a subclass says from which end it is taken and when.

    A cursor stands on the next request at either end, or both are past one another when none is left that was
    never admitted. Cursors move when something happens, so that `next_request` only looks.
    """

    def __init__(self, plan: Plan, limits: EngineLimits, ledger: Ledger | None = None) -> None:
        """Takes the first plan; `ledger` is an empty one that a subclass shares with parts of its own."""
        self._limits = limits
        self._num_kept_free_blocks = limits.num_blocks - max(1, int(ADMISSIBLE_KV_SHARE * limits.num_blocks))
        self._ledger = Ledger() if ledger is None else ledger
        self._revision = plan.revision - 1
        self._order: list[int] = []
        self._left = 0
        self._right = -1
        self.revise(plan)

    @property
    def num_waiting(self) -> int:
        """Requests not in flight and not finished, preempted ones included."""
        return self._ledger.num_waiting

    def upcoming(self, num_requests: int) -> Sequence[int]:
        """Seqs that may be asked for next, soonest first. Does not mutate."""
        return [self._ledger.seq[slot] for slot in islice(self._soonest(), num_requests)]

    def begin_step(self, view: EngineView) -> int:
        """Everything that decoding leaves of `max_num_batched_tokens`."""
        return max(0, self._limits.max_num_batched_tokens - view.num_decoding)

    def admitted(self, seq: int, side: Side, num_cached_tokens: int) -> None:
        """The request is in flight; `num_cached_tokens` of its prompt came from the cache."""
        self._ledger.admit(self._ledger.slot_of[seq], side, num_cached_tokens)
        self._settle()

    def decoding(self, seq: int) -> None:
        """The request's prompt is complete and its first output token is there."""
        self._ledger.start_decoding(self._ledger.slot_of[seq])

    def advanced(self, num_steps: int) -> None:
        """Every decoding request grew by `num_steps` output tokens."""
        self._ledger.advance(num_steps)

    def finished(self, seq: int, num_output_tokens: int) -> None:
        """The request ended, or left the queue."""
        slot = self._ledger.slot_of.get(seq)
        if slot is not None and self._ledger.finish(slot):
            self._settle()

    def preempted(self, seq: int) -> None:
        """The request lost its blocks and waits again, before those never admitted."""
        self._ledger.preempt(self._ledger.slot_of[seq])
        self._settle()

    def revise(self, plan: Plan) -> None:
        """Takes a later revision; what it does not name keeps its estimates and goes last.

        Raises:
            PlanError: the revision is earlier than the one in force, or made for another block size.
        """
        if plan.revision < self._revision:
            raise PlanError(
                f"Plan revision {plan.revision} is earlier than {self._revision}, the one in force; "
                "number it higher.",
                revision=plan.revision,
            )
        if plan.summary.block_size != self._limits.block_size:
            raise PlanError(
                f"The plan is made for blocks of {plan.summary.block_size} tokens and the engine's have "
                f"{self._limits.block_size}; plan again for the engine's block size.",
                revision=plan.revision,
            )
        self._revision = plan.revision
        phase = self._ledger.phase
        left_over = self._unstarted()
        named = self._ledger.take(plan)
        in_plan = set(named)
        order = [*named, *(slot for slot in left_over if slot not in in_plan)]
        self._order = self._queue(plan, [slot for slot in order if phase[slot] is WAITING])
        self._left = 0
        self._right = len(self._order) - 1
        self._settle()

    @abstractmethod
    def _soonest(self) -> Iterator[int]:
        """Waiting slots in the order in which they may be asked for."""

    def _queue(self, plan: Plan, waiting: list[int]) -> list[int]:
        """Takes the slots that a new plan leaves waiting; returns those that the cursors go over."""
        return waiting

    def _unstarted(self) -> list[int]:
        """Slots that were never admitted, and perhaps some that ended."""
        return self._order[self._left : self._right + 1]

    def _settle(self) -> None:
        """Moves the cursors off requests that no longer wait."""
        order, phase = self._order, self._ledger.phase
        while self._left <= self._right and phase[order[self._left]] is not WAITING:
            self._left += 1
        while self._left <= self._right and phase[order[self._right]] is not WAITING:
            self._right -= 1

    def _has_room(self, view: EngineView, slot: int) -> bool:
        """Whether the request's prompt fits the admissible share of KV beside what is in flight."""
        has_seat = view.num_running < self._limits.max_num_seqs
        return has_seat and self._fits(view, slot, view.num_free_blocks - self._num_kept_free_blocks)

    def _fits(self, view: EngineView, slot: int, num_blocks: int) -> bool:
        """Whether that many blocks have room for the request's prompt; whether one more may run is for the
        caller to look."""
        ledger = self._ledger
        num_needed = -(-(ledger.num_prefill_tokens(slot) + 1) // self._limits.block_size)
        if num_needed <= num_blocks:
            return True
        # Asked only when it decides: looking a long prompt up in the cache costs as much as a step of policy.
        return num_blocks > 0 and num_needed - view.num_held_blocks(ledger.seq[slot]) <= num_blocks
