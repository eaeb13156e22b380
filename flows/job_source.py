"""A job's requests as an engine pulls them: the plan, its revisions, token ids and withdrawals."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from blend_core.errors import PlanError
from blend_core.plan import Plan, frozen
from blend_core.request import Request

FetchRequests = Callable[[Sequence[int]], Sequence[Request]]


class JobSource:
    """The `RecallingSource` of one engine run.

    Threads meet here: the engine's side asks (`plan`, `fetch`, `revision`, `withdrawn`, `recalled`), the
    ranks tell (`revise`, `withdraw`, `recall`). Every call is safe from any.

    Invariants:
        - revisions handed out never go back;
        - a revision names no request that was withdrawn or asked back before it was handed out;
        - a withdrawn request is told exactly once, one that is asked back once each time.
    """

    __slots__ = (
        "_ever_recalled",
        "_fetch",
        "_latest",
        "_lock",
        "_next_revision",
        "_recalled",
        "_told",
        "_withdrawn",
    )

    def __init__(self, plan: Plan, fetch: FetchRequests) -> None:
        """Takes the plan to start with, restricted to what is to run, and a way to read requests."""
        self._latest = plan
        self._next_revision: Plan | None = None
        self._withdrawn: dict[int, None] = {}
        self._told = 0
        # What the engine was not asked for yet, and all that ever was to be asked for.
        self._recalled: list[int] = []
        self._ever_recalled: set[int] = set()
        self._fetch = fetch
        self._lock = threading.Lock()

    def plan(self) -> Plan:
        """The plan in force, without what was withdrawn."""
        with self._lock:
            self._next_revision = None
            return self._without_taken(self._latest)

    def fetch(self, seqs: Sequence[int]) -> Sequence[Request]:
        """The named requests, in the order asked for. Raises `StorageError` when they cannot be read."""
        return self._fetch(seqs)

    def revision(self) -> Plan | None:
        """A plan that was not handed out yet, or None."""
        if self._next_revision is None:
            return None
        with self._lock:
            plan, self._next_revision = self._next_revision, None
            return None if plan is None else self._without_taken(plan)

    def withdrawn(self) -> Sequence[int]:
        """Seqs withdrawn since the last call."""
        if len(self._withdrawn) == self._told:
            return ()
        with self._lock:
            seqs = list(self._withdrawn)[self._told :]
            self._told += len(seqs)
            return seqs

    def recalled(self) -> Sequence[int]:
        """Seqs asked back since the last call."""
        with self._lock:
            recalled, self._recalled = self._recalled, []
            return recalled

    def revise(self, plan: Plan) -> None:
        """Hands a later revision to the engine, or the one in force with other requests, within moments.

        Raises:
            PlanError: `plan.revision` is earlier than the one in force.
        """
        with self._lock:
            if plan.revision < self._latest.revision:
                raise PlanError(
                    f"Plan revision {plan.revision} is earlier than revision {self._latest.revision}, "
                    "which is in force; plan again from the latest one."
                )
            self._latest = self._next_revision = plan

    def withdraw(self, seqs: Iterable[int]) -> None:
        """Takes requests back: they will not start, and the engine drops those in flight. Idempotent."""
        with self._lock:
            self._withdrawn.update(dict.fromkeys(seqs))

    def recall(self, seqs: Iterable[int]) -> None:
        """Asks requests back: they will not start, and those in flight run on. The engine answers."""
        with self._lock:
            new = list(seqs)
            self._recalled += new
            self._ever_recalled.update(new)

    def _without_taken(self, plan: Plan) -> Plan:
        taken = self._ever_recalled.union(self._withdrawn)
        if not taken:
            return plan
        return part_of_plan(plan, ~np.isin(plan.seq, np.fromiter(taken, dtype=np.int64, count=len(taken))))


def pending_part(plan: Plan, pending: Sequence[int] | npt.NDArray[np.int64]) -> Plan:
    """The requests of a plan that are still to run, in the plan's order.

    Args:
        plan: any revision of the job's plan.
        pending: seqs that have no result; those that the plan does not name are left out.
    """
    return part_of_plan(plan, np.isin(plan.seq, np.asarray(pending, dtype=np.int64)))


def part_of_plan(plan: Plan, keep: npt.NDArray[np.bool_]) -> Plan:
    """The plan with only the rows where `keep` is true; `plan` itself is not changed.

    The summary counts the part; its other figures stay those of the whole plan. What a request shares with
    the one before it in the part is the least of what was shared along the rows between them: a lower bound
    in any order, exact depth first.

    Args:
        plan: the plan.
        keep: `(num_requests,)` bool.
    """
    if keep.all():
        return plan
    kept = np.flatnonzero(keep)
    num_prompt_tokens = plan.num_prompt_tokens[kept]
    rows: dict[str, Any] = {name: frozen(getattr(plan, name)[kept]) for name in _ROW_ARRAYS}
    return replace(
        plan,
        summary=replace(
            plan.summary,
            num_requests=len(kept),
            num_prompt_tokens=int(num_prompt_tokens.sum(dtype=np.int64)),
        ),
        num_shared_tokens=frozen(_shared_along(plan.num_shared_tokens, kept)),
        **rows,
    )


_ROW_ARRAYS = (
    "seq",
    "num_prompt_tokens",
    "max_tokens",
    "estimated_output_tokens",
    "estimated_output_tokens_sq",
    "compute_s",
    "memory_s",
    "lead",
    "length_group",
)


def _shared_along(shared: npt.NDArray[np.int32], kept: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """What each kept row shares with the kept row before it."""
    if len(kept) == 0:
        return shared[:0].copy()
    # Ranges from behind the last kept row up to this one follow one another: one pass of minima.
    starts = np.concatenate((np.zeros(1, dtype=np.int64), kept[:-1] + 1))
    least = np.minimum.reduceat(shared[: kept[-1] + 1], starts)
    least[0] = 0
    return least
