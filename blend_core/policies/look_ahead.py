"""Which request of the memory-intensive side may start: one that KV ahead has room for."""

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from blend_core.policies.base import RIGHT
from blend_core.policies.kv_projection import KvProjection
from blend_core.policies.ledger import PREEMPTED, Ledger
from blend_core.policies.matching_rules import MatchingRules
from blend_core.policies.pace import RunningWork
from blend_core.policies.waiting_sides import WaitingSides

DEVIATIONS: Final = 1.5
"""Standard deviations kept free above the expected KV while two sides share it: running out means a
preemption, and it hits the short requests of the left side that were admitted last."""

EAGER_DEVIATIONS: Final = -6.0
"""The same where KV has no other use: of answers of unknown length counts in effect what they hold now, since
a preemption now and then costs less than KV that nobody uses."""


_NOTHING: Final = (-1, -1)
"""In place of a slot and a step: no request was looked at."""


class LookAhead:
    """Finds the right side's next request, and keeps what is in flight ahead.

    A candidate is a waiting request that was found to fit; it stays one until it starts or leaves, or until
    sums are made anew. Ledger and sides are the policy's, only looked at.

    Attributes:
        candidate: slot of the request that may start; None where none was found.
        again_at: step at which to look again.
        projection: KV that the right side's requests in flight will hold.
    """

    __slots__ = (
        "_blocked",
        "_ledger",
        "_looked_at",
        "_looks_ahead",
        "_rules",
        "_sides",
        "again_at",
        "candidate",
        "projection",
    )

    def __init__(self, ledger: Ledger, sides: WaitingSides, rules: MatchingRules) -> None:
        """Begins with nothing in flight."""
        self._ledger = ledger
        self._sides = sides
        self._rules = rules
        self._looked_at = _NOTHING
        self._blocked: tuple[int, int, float] | None = None
        self._looks_ahead = rules.looks_ahead
        self.projection = KvProjection()
        self.candidate: int | None = None
        self.again_at = 0

    def forget(self, again_at: int) -> None:
        """What was found holds no more; looks again from a step on."""
        self.candidate, self.again_at = None, again_at

    def renew(self, running: RunningWork, *, balances: bool, looks_ahead: bool) -> None:
        """Takes sums that were made anew.

        Args:
            running: what the right side has in flight.
            balances: whether the left side shares KV and must be spared preemptions.
            looks_ahead: whether KV ahead counts; else a request starts that has room now.
        """
        self._looks_ahead = looks_ahead and self._rules.looks_ahead
        deviations = EAGER_DEVIATIONS
        if balances:
            deviations = DEVIATIONS if self._rules.keeps_deviations else 0.0
        clock = self._ledger.clock
        self.projection.replace(clock, running.kv_mean, running.kv_variance, deviations)
        self._looked_at, self._blocked = _NOTHING, None
        self.forget(clock)

    def look(self, head_of: Callable[[], int | None], limit_tokens: float, refresh_at: int) -> int | None:
        """Returns the candidate, None where there is none.

        One that KV ahead has room for is looked for after a refresh, and after each right request that starts
        or leaves.

        Args:
            head_of: tells the right side's next; not asked where nothing is looked for.
            limit_tokens: KV tokens that the right side may come to.
            refresh_at: step at which sums are made anew; nothing changes for the better before.
        """
        if self.candidate is not None or self._ledger.clock < self.again_at:
            return self.candidate
        self.again_at = refresh_at
        head = head_of()
        if head is None:
            return None
        clock = self._ledger.clock
        # What does not fit beside nothing never will.
        if not self._looks_ahead or self._ledger.num_running[RIGHT] == 0:
            self.candidate = head
            return head
        # Not looked at twice in a step: what did not fit does not fit beside one more.
        if self._blocked != (head, clock, limit_tokens):
            if self._fits(head, limit_tokens):
                self.candidate = head
                return head
            self._blocked = head, clock, limit_tokens
        if self._rules.fills_gaps and not self._must_be_next(head):
            longest = self.projection.longest_fit(self._sides.num_own_tokens(head), limit_tokens)
            filler = self._sides.filler(longest)
            if filler is not None and self._fits(filler, limit_tokens):
                self.candidate = filler
        return self.candidate

    def start(self, slot: int) -> None:
        """A right request was admitted."""
        if self._looked_at == (slot, self._ledger.clock):
            self.projection.join()
        else:
            self.projection.add(*self._ahead_of(slot))
        self._looked_at = _NOTHING
        self.forget(self._ledger.clock)

    def _must_be_next(self, head: int) -> bool:
        """Whether nothing may go before a request: one that was preempted, or that is a sample."""
        is_back = self._ledger.phase[head] is PREEMPTED
        return is_back or self._sides.first_lead(RIGHT) is not None

    def _fits(self, slot: int, limit_tokens: float) -> bool:
        """Whether KV stays within the limit up to the end of every answer, with this one."""
        self._looked_at = slot, self._ledger.clock
        num_tokens, alive = self._ahead_of(slot)
        return self.projection.fits(num_tokens, alive, limit_tokens)

    def _ahead_of(self, slot: int) -> tuple[int, npt.NDArray[np.float64]]:
        """What a request will hold by itself as it starts, and the probability that it runs on from then."""
        ledger = self._ledger
        output = ledger.num_kept_tokens[slot]
        alive = self.projection.alive(
            self._sides.kind(slot).lengths, output, ledger.output_tokens[slot] - output
        )
        return self._sides.num_own_tokens(slot), alive
