"""Requests behind a prefix that is dear to compute twice: they are taken from one side, one after another."""

from collections.abc import Callable
from typing import Final

import numpy as np

from blend_core.plan import Plan
from blend_core.policies.base import Side
from blend_core.policies.ledger import DECODING, PREFILLING, WAITING, Ledger

COPY_SHARE: Final = 0.05
"""A prefix may be computed once more where that takes at most this share of the time of its requests: being
on two sides gains a few times as much."""

NO_BUNDLE: Final = -1
"""In place of a bundle's number: the request belongs to none."""


class Bundles:
    """The bundles of a plan, and the side that each is on.

    A bundle are all requests that share a prefix whose second copy would take more than `COPY_SHARE` of the
    time of all of them, by the plan's estimates. They are neighbours in planned order.
    """

    __slots__ = ("_by_first", "_members", "_number", "_prefix_tokens", "_sides")

    def __init__(self, members: list[list[int]]) -> None:
        """Takes the slots of each in planned order, which have no side yet."""
        self._members = members
        self._sides: list[Side | None] = [None] * len(members)
        self._number = {slot: number for number, slots in enumerate(members) for slot in slots}
        self._by_first = {slots[0]: slots[1:] for slots in members}
        self._prefix_tokens: dict[int, int] = {}

    def number_of(self, slot: int) -> int:
        """The bundle that a request belongs to; `NO_BUNDLE` for none."""
        return self._number.get(slot, NO_BUNDLE)

    def side_of(self, slot: int) -> Side | None:
        """The side that a request is on with its bundle, as of the last `sort`; None where it has none."""
        number = self._number.get(slot)
        return None if number is None else self._sides[number]

    def num_held_tokens(self, slot: int, ledger: Ledger) -> int:
        """Prompt tokens of a request that others of its bundle in flight hold, where the plan counts on none
        before it: the first in planned order may come last."""
        others = self._by_first.get(slot)
        if others is None:
            return 0
        phase = ledger.phase
        if not any(phase[other] in (PREFILLING, DECODING) for other in others):
            return 0
        num_tokens = self._prefix_tokens.get(slot)
        if num_tokens is None:
            num_tokens = self._prefix_tokens[slot] = min(map(ledger.num_shared_tokens.__getitem__, others))
        return num_tokens

    def sort(self, ledger: Ledger, side_of: Callable[[list[int], Side | None], Side]) -> None:
        """Gives each its side: that of those in flight, whose prefix is there, or as it is told.

        Args:
            ledger: of the policy, only looked at.
            side_of: tells the side of what waits of a bundle, by the slots and the side that they are on.
        """
        phase = ledger.phase
        for number, slots in enumerate(self._members):
            in_flight = next((slot for slot in slots if phase[slot] in (PREFILLING, DECODING)), None)
            if in_flight is not None:
                self._sides[number] = ledger.side[in_flight]
            elif waiting := [slot for slot in slots if phase[slot] is WAITING]:
                self._sides[number] = side_of(waiting, self._sides[number])


def bundles_of(plan: Plan) -> list[range]:
    """Returns the places of the bundles, rising and disjoint: of prefixes within prefixes the outermost."""
    times = plan.step_times
    shared = plan.num_shared_tokens.astype(np.float64)
    prefix_s = (times.gemm_s_per_token * shared + times.prefill_s_per_token_sq * shared * shared).tolist()
    spent_s = np.concatenate(([0.0], np.cumsum(plan.compute_s + plan.memory_s))).tolist()
    bundles: list[range] = []
    # Prefixes that the last request had and the next may have: where the first request of each stands, and
    # seconds that computing it takes from the start. The innermost is last.
    open_prefixes: list[tuple[int, float]] = [(0, 0.0)]
    for place, shared_s in enumerate([*prefix_s[1:], 0.0], start=1):
        first = place - 1
        while open_prefixes[-1][1] > shared_s:
            first, own_s = open_prefixes.pop()
            copied_s = own_s - max(open_prefixes[-1][1], shared_s)
            if copied_s > COPY_SHARE * (spent_s[place] - spent_s[first]):
                while bundles and bundles[-1].start >= first:
                    bundles.pop()
                bundles.append(range(first, place))
        if open_prefixes[-1][1] < shared_s:
            open_prefixes.append((first, shared_s))
    return bundles
