"""Requests that have begun, kind by kind: what they have still to do, and what they tell of lengths."""

from collections.abc import Collection, Iterator
from itertools import chain

import numpy as np
import numpy.typing as npt

from blend_core.length_distribution import learn_lengths, length_counts
from blend_core.policies.base import RIGHT, Side
from blend_core.policies.ledger import Ledger
from blend_core.policies.pace import RunningRequests
from blend_core.policies.request_kind import RequestKind
from blend_core.policies.waiting_sides import WaitingSides


class InFlight:
    """Slots in flight by kind and side, as of what the policy has told; the ledger, which is the policy's, is
    only looked at.

    A preempted request is not in flight. It has begun all the same, and waits in the ledger.
    """

    __slots__ = ("_ledger", "_sides")

    def __init__(self, ledger: Ledger, sides: WaitingSides) -> None:
        """Begins with nothing in flight."""
        self._ledger = ledger
        self._sides = sides

    def enter(self, slot: int, side: Side) -> None:
        """A request was admitted on a side."""
        self._sides.kind(slot).in_flight[side].add(slot)

    def leave(self, slot: int, side: Side) -> None:
        """A request that was admitted on a side ended or was preempted."""
        self._sides.kind(slot).in_flight[side].discard(slot)

    def observe(self, slot: int, num_output_tokens: int) -> None:
        """A request's answer ended with so many tokens, which tells something of its kind."""
        lengths = self._sides.kind(slot).lengths
        if lengths is not None:
            lengths.observe(num_output_tokens)

    def right_side(self) -> Iterator[RunningRequests]:
        """The right side's requests that have begun and go on, kind by kind."""
        ledger = self._ledger
        preempted: dict[int, list[int]] = {}
        for slot in ledger.preempted[RIGHT]:
            preempted.setdefault(id(self._sides.kind(slot)), []).append(slot)
        for kind in self._sides.kinds():
            in_flight = kind.in_flight[RIGHT]
            slots = [*in_flight, *preempted.get(id(kind), ())]
            if not slots:
                continue
            output = ledger.output_tokens_so_far(slots)
            estimated = np.fromiter(map(ledger.output_tokens.__getitem__, slots), np.float64, len(slots))
            yield RunningRequests(
                kind.lengths,
                output,
                ledger.unshared_prompt_tokens(slots) + output,
                estimated - output,
                np.arange(len(slots)) < len(in_flight),
            )

    def learn(self, *, counts_running: bool) -> None:
        """Estimates lengths of every kind from answers that ended, and from those that run if they count."""
        learn_lengths(
            [
                (lengths, length_counts(self._output_tokens(kinds) if counts_running else ()))
                for lengths, kinds in self._sides.learning_kinds()
            ]
        )

    def _output_tokens(self, kinds: Collection[RequestKind]) -> npt.NDArray[np.float64]:
        """What the requests of kinds that have begun and go on have by now."""
        preempted = chain.from_iterable(self._ledger.preempted.values())
        in_flight = chain.from_iterable(kind.in_flight.values() for kind in kinds)
        return self._ledger.output_tokens_so_far(
            [
                *chain.from_iterable(in_flight),
                *(slot for slot in preempted if self._sides.kind(slot) in kinds),
            ]
        )
