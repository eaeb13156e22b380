"""Policies that take the plan from the left: `fcfs`, `dfs` and `random` differ in how they are planned."""

from collections.abc import Iterator
from typing import ClassVar

from blend_core.policies.base import FOR_EVER, LEFT, Admission, EngineView
from blend_core.policies.ledger import WAITING
from blend_core.policies.queued import QueuedPolicy


class InOrderPolicy(QueuedPolicy):
    """Admits the plan's first waiting request while its prompt fits 95 % of KV.

    Everything is on the left account.
    """

    def next_request(self, view: EngineView) -> Admission | None:
        """The head of the queue, or None while it does not fit. Does not mutate."""
        slot = next(self._soonest(), None)
        if slot is None or not view.is_ready(self._ledger.seq[slot]):
            return None
        if view.num_running == 0 or self._has_room(view, slot):
            return Admission(self._ledger.seq[slot], LEFT)
        return None

    def quiet_steps(self, view: EngineView) -> int:
        """For ever: decoding only takes room."""
        return FOR_EVER

    def _soonest(self) -> Iterator[int]:
        ledger = self._ledger
        yield from ledger.preempted[LEFT]
        for position in range(self._left, self._right + 1):
            slot = self._order[position]
            if ledger.phase[slot] is WAITING:
                yield slot


class FcfsPolicy(InOrderPolicy):
    """First come, first served: the plan is in the order of the job's sources."""

    name: ClassVar[str] = "fcfs"


class DfsPolicy(InOrderPolicy):
    """Depth first over the prefix tree: the plan puts requests that share a prefix side by side."""

    name: ClassVar[str] = "dfs"


class RandomPolicy(InOrderPolicy):
    """The plan is shuffled by the planner's seeded generator."""

    name: ClassVar[str] = "random"
