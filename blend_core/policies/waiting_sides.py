"""What waits, in two sides by compute density: kinds of requests, their lengths, and who comes next."""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from blend_core.length_distribution import LENGTH_GRID, LengthDistribution
from blend_core.performance import StepTimeModel
from blend_core.plan import LengthGroup, Plan
from blend_core.policies.base import LEFT, RIGHT, Side
from blend_core.policies.ledger import WAITING, Ledger
from blend_core.policies.long_first import LongFirst
from blend_core.policies.request_kind import RequestKind, Work, request_density, total_work

SIDE_HYSTERESIS: Final = 1.25
"""A kind changes sides when its density has passed that of all by this factor: what is near may be on
either."""

EVEN_SHARE: Final = 1e-9
"""Densities that differ by less are equal: requests that are all alike are on the right side, whose KV is
looked after."""


class WaitingSides:
    """The requests of a plan that were never admitted, sorted into a left and a right side.

    On the right are those whose density is below that of all that waits. A kind whose lengths are learned in
    mid-run may change sides; `sort` puts it there. Preempted requests are the ledger's.

    Attributes:
        left: waiting slots of the left side in planned order, as of the last `sort`; leads left out.
        num_sorted: requests that waited at the last `sort`.
    """

    __slots__ = (
        "_is_alone",
        "_kind",
        "_kinds",
        "_known",
        "_leads",
        "_ledger",
        "_long_first",
        "_planned",
        "_rho",
        "_times",
        "left",
        "num_sorted",
    )

    def __init__(self, ledger: Ledger, times: StepTimeModel) -> None:
        """Begins empty; `ledger` is the policy's, only looked at."""
        self._ledger = ledger
        self._times = times
        self._kinds: list[RequestKind] = []
        self._known = {side: RequestKind(None, side) for side in Side}
        self._kind: list[RequestKind] = []
        self._is_alone: list[bool] = []
        self._planned: list[int] = []
        self._leads: dict[Side, deque[int]] = {side: deque() for side in Side}
        self._rho = 0.0
        self.left: list[int] = []
        self.num_sorted = 0
        self._long_first = self._right_side([])

    def take(self, plan: Plan, waiting: list[int]) -> None:
        """Takes a plan whose slots are in the ledger; `waiting` were never admitted, in planned order."""
        self._times = plan.step_times
        is_first = not self._kind
        self._take_kinds(plan)
        leads = set(plan.seq[plan.lead].tolist())
        self._planned = waiting
        seq = self._ledger.seq
        self._leads = {LEFT: deque(slot for slot in waiting if seq[slot] in leads), RIGHT: deque()}
        self.sort(first_time=is_first)

    def sort(self, *, first_time: bool = False) -> None:
        """Sorts what waits into sides, and each side into its order; takes time with the number of requests.

        Kinds stay on their side near the density of all, but not the `first_time`.
        """
        ledger = self._ledger
        phase = ledger.phase
        self._planned = waiting = self.unstarted()
        self.num_sorted = len(waiting)
        for kind in self.kinds():
            kind.clear()
        known: list[int] = []
        for slot in waiting:
            if self._kind[slot].lengths is None:
                # Any side, until the density of all is known.
                self._kind[slot] = self._known[LEFT]
                known.append(slot)
            self._count(slot, 1)
        self._rho = total_work(self.kinds()).density(self._times)
        for kind in self._kinds:
            kind.side = self._side_of(kind, 1.0 if first_time else SIDE_HYSTERESIS)
        for slot in known:
            prompt, shared = ledger.num_prompt_tokens[slot], ledger.num_shared_tokens[slot]
            density = request_density(self._times, prompt, shared, ledger.output_tokens[slot])
            if density <= self._rho * (1.0 + EVEN_SHARE):
                self._count(slot, -1)
                self._kind[slot] = self._known[RIGHT]
                self._count(slot, 1)
        sampled = [slot for side in Side for slot in self._leads[side] if phase[slot] is WAITING]
        self._leads = {side: deque() for side in Side}
        for slot in sampled:
            self._leads[self._kind[slot].side].append(slot)
        is_lead = set(sampled)
        rest = [slot for slot in waiting if slot not in is_lead]
        self.left = [slot for slot in rest if self._kind[slot].side is LEFT]
        self._long_first = self._right_side(
            [slot for slot in reversed(rest) if self._kind[slot].side is RIGHT]
        )

    @property
    def is_out_of_order(self) -> bool:
        """Whether a kind is on the other side than its density, as far as it is known now, says."""
        return any(self._side_of(kind, SIDE_HYSTERESIS) is not kind.side for kind in self._kinds)

    def unstarted(self) -> list[int]:
        """Slots that were never admitted, in planned order."""
        phase = self._ledger.phase
        return [slot for slot in self._planned if phase[slot] is WAITING]

    def leave(self, slot: int) -> None:
        """A request that was never admitted does not wait any more."""
        self._count(slot, -1)

    def work(self, side: Side) -> Work:
        """What waits on a side."""
        return total_work(kind for kind in self.kinds() if kind.side is side)

    def num_waiting(self, side: Side) -> int:
        """Requests that wait on a side and were never admitted."""
        return sum(kind.num_waiting for kind in self.kinds() if kind.side is side)

    def kinds(self) -> Iterator[RequestKind]:
        """All kinds, and those of known lengths."""
        return chain(self._kinds, self._known.values())

    def kind(self, slot: int) -> RequestKind:
        """The kind of a request."""
        return self._kind[slot]

    def expected_tokens(self, slot: int) -> float:
        """Expected length of a request's answer."""
        lengths = self._kind[slot].lengths
        return self._ledger.output_tokens[slot] if lengths is None else lengths.mean

    def first_lead(self, side: Side) -> int | None:
        """The sampled request that comes first on a side."""
        leads, phase = self._leads[side], self._ledger.phase
        while leads and phase[leads[0]] is not WAITING:
            leads.popleft()
        return leads[0] if leads else None

    def longest(self) -> int | None:
        """The right side's next request, sampled ones left out."""
        return self._long_first.head(self.expected_tokens)

    def filler(self, output_tokens: float) -> int | None:
        """A request of the right side that surely ends within so many tokens."""
        return self._long_first.filler(output_tokens)

    def right_soonest(self) -> Iterator[int]:
        """The right side's slots, roughly in the order in which they come."""
        return chain(self._leads[RIGHT], self._long_first)

    def left_leads(self) -> Iterator[int]:
        """The left side's sampled slots."""
        return iter(self._leads[LEFT])

    def _take_kinds(self, plan: Plan) -> None:
        """Gives every request its kind; one that has a kind keeps it, since its kind has learned things."""
        ledger = self._ledger
        groups = [
            RequestKind(LengthDistribution(group.max_tokens, _counts(group)), LEFT)
            for group in plan.length_groups
        ]
        first_new = len(self._kind)
        num_new = len(ledger.seq) - first_new
        self._kind.extend([self._known[LEFT]] * num_new)
        self._is_alone.extend([True] * num_new)
        shares_before = (plan.num_shared_tokens > 0).tolist()
        shares_behind = [*shares_before[1:], False][: len(shares_before)]
        used: set[int] = set()
        rows = zip(plan.seq.tolist(), plan.length_group.tolist(), shares_before, shares_behind, strict=True)
        for seq, group, is_shared, is_shared_on in rows:
            slot = ledger.slot_of[seq]
            self._is_alone[slot] = not (is_shared or is_shared_on)
            if slot >= first_new and group >= 0:
                self._kind[slot] = groups[group]
                used.add(group)
        self._kinds.extend(groups[group] for group in sorted(used))

    def _count(self, slot: int, sign: int) -> None:
        ledger = self._ledger
        self._kind[slot].count(
            sign,
            ledger.num_prompt_tokens[slot],
            ledger.num_shared_tokens[slot],
            ledger.output_tokens[slot],
        )

    def _right_side(self, planned: list[int]) -> LongFirst:
        ledger = self._ledger
        return LongFirst(
            planned,
            kind_of=lambda slot: self._kind[slot],
            is_alone=lambda slot: self._is_alone[slot],
            output_tokens=lambda slot: ledger.output_tokens[slot],
            is_waiting=lambda slot: ledger.phase[slot] is WAITING,
        )

    def _side_of(self, kind: RequestKind, hysteresis: float) -> Side:
        """The side that a kind belongs to; near the density of all it stays where it is."""
        if kind.num_waiting == 0:
            return kind.side
        density = kind.work().density(self._times)
        if kind.side is LEFT:
            return RIGHT if density * hysteresis <= self._rho * (1.0 + EVEN_SHARE) else LEFT
        return LEFT if density > hysteresis * self._rho else RIGHT


def _counts(group: LengthGroup) -> npt.NDArray[np.float64]:
    counts = np.zeros(len(LENGTH_GRID))
    for place, count in group.counts:
        counts[place] = count
    return counts
