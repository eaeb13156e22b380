"""What waits, in two sides by compute density: kinds of requests, their lengths, and who comes next."""

from collections import deque
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from blend_core.length_distribution import LENGTH_GRID, TOLD_ANSWERS, LengthDistribution
from blend_core.performance import StepTimeModel
from blend_core.plan import LengthGroup, Plan
from blend_core.policies.base import LEFT, RIGHT, Side
from blend_core.policies.bundles import NO_BUNDLE, Bundles, bundles_of
from blend_core.policies.ledger import WAITING, Ledger
from blend_core.policies.long_first import LongFirst
from blend_core.policies.request_kind import RequestKind, SplitKind, Work, request_work, total_work

SIDE_HYSTERESIS: Final = 1.25
"""A kind changes sides when its density has passed that of all by this factor: what is near may be on
either."""

EVEN_SHARE: Final = 1e-9
"""Densities that differ by less are equal: requests that are all alike are on the right side, whose KV is
looked after."""


class WaitingSides:
    """The requests of a plan that were never admitted, sorted into a left and a right side.

    On the right are those whose density is below that of all that waits. A kind whose lengths are learned in
    mid-run may change sides; `sort` puts it there. A bundle, requests that share a prefix which is dear to
    compute twice, is on one side with all its requests, whatever their kinds, and stays there while one of
    them runs. Preempted requests are the ledger's.

    Attributes:
        left: waiting slots of the left side in planned order, as of the last `sort`; leads left out.
        num_sorted: requests that waited at the last `sort`.
    """

    __slots__ = (
        "_bundles",
        "_is_alone",
        "_kind",
        "_kinds",
        "_known",
        "_leads",
        "_ledger",
        "_long_first",
        "_num_kv_tokens",
        "_part",
        "_planned",
        "_rho",
        "_times",
        "left",
        "num_sorted",
    )

    def __init__(self, ledger: Ledger, times: StepTimeModel, num_kv_tokens: int) -> None:
        """Begins empty; `ledger` is the policy's, only looked at."""
        self._ledger = ledger
        self._num_kv_tokens = num_kv_tokens
        self._times = times
        self._known = SplitKind(None)
        self._kinds: list[SplitKind] = []
        self._kind: list[SplitKind] = []
        self._part: list[RequestKind] = []
        self._is_alone: list[bool] = []
        self._bundles = Bundles([])
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
        self._bundles = self._bundles_of(plan)
        self._planned = waiting
        self._leads = {LEFT: deque(self._led(plan, waiting)), RIGHT: deque()}
        self.sort(first_time=is_first)

    def sort(self, *, first_time: bool = False) -> None:
        """Sorts what waits into sides, and each side into its order; takes time with the number of requests.

        Kinds stay on their side near the density of all, but not the `first_time`.
        """
        phase, part = self._ledger.phase, self._part
        self._planned = waiting = self.unstarted()
        self.num_sorted = len(waiting)
        for kind in self.kinds():
            kind.clear()
        # On any side, until the density of all is known.
        for slot in waiting:
            self._count(slot, 1)
        self._rho = total_work(self.kinds()).density(self._times)
        for both in self._kinds:
            both.side = self._side_of(both, 1.0 if first_time else SIDE_HYSTERESIS)
        self._bundles.sort(self._ledger, self._side_of_bundle)
        for slot in waiting:
            side = self._side_of_slot(slot)
            if part[slot].side is not side:
                self._count(slot, -1)
                part[slot] = self._kind[slot].parts[side]
                self._count(slot, 1)
        sampled = [slot for side in Side for slot in self._leads[side] if phase[slot] is WAITING]
        self._leads = {side: deque() for side in Side}
        for slot in sampled:
            self._leads[part[slot].side].append(slot)
        is_lead = set(sampled)
        rest = [slot for slot in waiting if slot not in is_lead]
        self.left = [slot for slot in rest if part[slot].side is LEFT]
        self._long_first = self._right_side([slot for slot in reversed(rest) if part[slot].side is RIGHT])

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

    def mean_unshared_tokens(self, side: Side) -> float:
        """Prompt tokens to compute of a request that waits on a side; 0 where none does."""
        num_waiting = sum(kind.num_waiting for kind in self.kinds() if kind.side is side)
        return self.work(side).num_prefill_tokens / max(1, num_waiting)

    def kinds(self) -> Iterator[RequestKind]:
        """All kinds, and those of known lengths, by the side that they are on."""
        return chain.from_iterable(both.parts.values() for both in (*self._kinds, self._known))

    @property
    def are_lengths_guessed(self) -> bool:
        """Whether most output tokens expected of what waits are of kinds with few answers seen."""
        guessed = sum(
            part.num_waiting * lengths.mean
            for lengths, parts in self.learning_kinds()
            if lengths.num_seen < TOLD_ANSWERS
            for part in parts
        )
        return 2.0 * guessed > total_work(self.kinds()).num_output_tokens

    def learning_kinds(self) -> Iterator[tuple[LengthDistribution, Collection[RequestKind]]]:
        """What is learned about lengths, and those whose answers tell of it."""
        for both in self._kinds:
            lengths = both.parts[LEFT].lengths
            assert lengths is not None, "known lengths are none of these kinds"
            yield lengths, both.parts.values()

    def kind(self, slot: int) -> RequestKind:
        """The kind of a request, on the side that it is on."""
        return self._part[slot]

    def num_own_tokens(self, slot: int) -> int:
        """KV tokens that a request holds by itself when it starts now."""
        num_tokens = self._ledger.num_own_tokens(slot)
        if (num_held := self._bundles.num_held_tokens(slot, self._ledger)) > 0:
            num_tokens -= max(0, num_held - self._ledger.num_shared_tokens[slot])
        return num_tokens

    def expected_tokens(self, slot: int) -> float:
        """Expected length of a request's answer."""
        lengths = self._part[slot].lengths
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
            SplitKind(LengthDistribution(group.max_tokens, _counts(group))) for group in plan.length_groups
        ]
        first_new = len(self._kind)
        num_new = len(ledger.seq) - first_new
        self._kind.extend([self._known] * num_new)
        self._part.extend([self._known.parts[LEFT]] * num_new)
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
                self._part[slot] = groups[group].parts[LEFT]
                used.add(group)
        self._kinds.extend(groups[group] for group in sorted(used))

    def _bundles_of(self, plan: Plan) -> Bundles:
        num_prompt_tokens = (plan.num_prompt_tokens - plan.num_shared_tokens).sum()
        if num_prompt_tokens + plan.estimated_output_tokens.sum() <= self._num_kv_tokens:
            # Every prefix stays in KV: from both sides it is computed once.
            return Bundles([])
        slots = [self._ledger.slot_of[seq] for seq in plan.seq.tolist()]
        return Bundles([slots[places.start : places.stop] for places in bundles_of(plan)])

    def _led(self, plan: Plan, waiting: list[int]) -> Iterator[int]:
        """Sampled requests, and all that are of one bundle with them behind them."""
        bundle_of = self._bundles.number_of
        sampled = {self._ledger.slot_of[seq] for seq in plan.seq[plan.lead].tolist()}
        led = set(map(bundle_of, sampled)) - {NO_BUNDLE}
        yield from (slot for slot in waiting if slot in sampled and bundle_of(slot) == NO_BUNDLE)
        yield from (slot for slot in waiting if bundle_of(slot) in led)

    def _count(self, slot: int, sign: int) -> None:
        ledger = self._ledger
        self._part[slot].count(
            sign,
            ledger.num_prompt_tokens[slot],
            ledger.num_shared_tokens[slot],
            ledger.output_tokens[slot],
        )

    def _right_side(self, planned: list[int]) -> LongFirst:
        ledger = self._ledger
        return LongFirst(
            planned,
            lengths_of=lambda slot: self._part[slot].lengths,
            is_alone=lambda slot: self._is_alone[slot],
            bundle_of=self._bundles.number_of,
            output_tokens=lambda slot: ledger.output_tokens[slot],
            is_waiting=lambda slot: ledger.phase[slot] is WAITING,
        )

    def _side_of_bundle(self, slots: list[int], side: Side | None) -> Side:
        """The side of requests together; near the density of all they stay where they are."""
        work = Work()
        for slot in slots:
            work.add(self._work_of(slot))
        return self._side_at(work, side or LEFT, 1.0 if side is None else SIDE_HYSTERESIS)

    def _side_of_slot(self, slot: int) -> Side:
        """The side that a waiting request belongs to, once kinds and bundles have theirs."""
        side = self._bundles.side_of(slot)
        if side is not None:
            return side
        kind = self._kind[slot]
        return self._side_at(self._work_of(slot), LEFT, 1.0) if kind is self._known else kind.side

    def _work_of(self, slot: int) -> Work:
        ledger, lengths = self._ledger, self._part[slot].lengths
        output_tokens = ledger.output_tokens[slot] if lengths is None else lengths.mean
        output_tokens_sq = output_tokens**2 if lengths is None else lengths.second_moment
        return request_work(
            ledger.num_prompt_tokens[slot], ledger.num_shared_tokens[slot], output_tokens, output_tokens_sq
        )

    def _side_of(self, kind: SplitKind, hysteresis: float) -> Side:
        """The side that a kind belongs to; near the density of all it stays where it is."""
        if not any(part.num_waiting for part in kind.parts.values()):
            return kind.side
        return self._side_at(total_work(kind.parts.values()), kind.side, hysteresis)

    def _side_at(self, work: Work, side: Side, hysteresis: float) -> Side:
        density = work.density(self._times)
        if side is LEFT:
            return RIGHT if density * hysteresis <= self._rho * (1.0 + EVEN_SHARE) else LEFT
        return LEFT if density > hysteresis * self._rho else RIGHT


def _counts(group: LengthGroup) -> npt.NDArray[np.float64]:
    counts = np.zeros(len(LENGTH_GRID))
    for place, count in group.counts:
        counts[place] = count
    return counts
