"""`dfs` with the admission rule of `density_matched`: what the rule gives without the order."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import ClassVar

from blend_core.plan import Plan
from blend_core.policies.base import EngineLimits, Side
from blend_core.policies.density_matched import ALL_RULES, DensityMatchedPolicy
from blend_core.policies.pace import RunningWork


class DfsAheadPolicy(DensityMatchedPolicy):
    """Admits in planned order, each request as soon as KV ahead has room for it. There is no left side."""

    name: ClassVar[str] = "dfs_ahead"

    def __init__(self, plan: Plan, limits: EngineLimits) -> None:
        # One that goes before its turn would leave the order.
        super().__init__(plan, limits, replace(ALL_RULES, fills_gaps=False))

    def _queue(self, plan: Plan, waiting: list[int]) -> list[int]:
        super()._queue(plan, waiting)
        return waiting

    def _sort_anew(self) -> None:
        # Kinds have no sides here, so none can be on the wrong one.
        self._sides.sort()
        self._start_over()

    def _balance_pays(self, running: RunningWork) -> bool:
        # The rule is measured as the whole policy has it here, with KV kept free for long answers.
        return True

    def _left_head(self) -> int | None:
        return None

    def _right_head(self) -> int | None:
        preempted = self._ledger.preempted[Side.RIGHT]
        if preempted:
            return preempted[0]
        return self._order[self._left] if self._left <= self._right else None

    def _soonest(self) -> Iterator[int]:
        ledger = self._ledger
        waiting = chain(ledger.preempted[Side.RIGHT], islice(self._order, self._left, None))
        return (slot for slot in waiting if ledger.is_waiting(slot))
