"""What a run asks of the scheduler. No vLLM here."""

import time
from collections.abc import Sequence
from typing import Final, Protocol

from blend_core.engines.vllm.admission_queue import AdmissionQueue
from blend_core.engines.vllm.reports import StepReports
from blend_core.errors import EngineError
from blend_core.plan import Plan
from blend_core.policies.base import EngineLimits
from blend_core.policies.factory import make_policy

_LET_GO_S: Final = 60.0
"""vLLM lets go of what is aborted when the step that it computes is through."""

_LOOK_EVERY_S: Final = 0.005


class SchedulerControl(Protocol):
    """The scheduler, as a run sees it."""

    def limits(self) -> EngineLimits:
        """What the policy must respect, in the policy's unit of blocks."""

    def start(self, policy: str, plan: Plan) -> int:
        """Begins a run under the named policy, once vLLM has let go of what was aborted of an earlier one.

        Returns the run's number, which its requests say (`RUN_ARGUMENT`).

        Raises:
            PlanError: the plan is for another block size.
            EngineError: vLLM does not let go.
        """

    def revise(self, plan: Plan) -> None:
        """Puts a later plan in force. Raises `PlanError` where it is not later."""

    def upcoming(self, num_requests: int) -> Sequence[int]:
        """Seqs that may be asked for next, as `AdmissionPolicy.upcoming` says."""

    def withdraw(self, seqs: Sequence[int], queued: Sequence[int]) -> None:
        """Sees to it that no request of these starts any more, and that the policy forgets them.

        `queued` are those that vLLM was given, in its scheduler already or on their way: abort them.
        """

    def release(self, seqs: Sequence[int]) -> tuple[int, ...]:
        """Lets go of requests that wait, to be queued again later; returns those it let go of."""

    def tell_all(self) -> None:
        """Has the steps that are through and were not told yet reported now."""


class LocalControl:
    """A `SchedulerControl` over a queue in this process. Safe to use from another thread than vLLM's."""

    def __init__(self, queue: AdmissionQueue, reports: StepReports, limits: EngineLimits) -> None:
        self._queue = queue
        self._reports = reports
        self._limits = limits

    def limits(self) -> EngineLimits:
        """See `SchedulerControl`."""
        return self._limits

    def start(self, policy: str, plan: Plan) -> int:
        """See `SchedulerControl`."""
        deadline_s = time.monotonic() + _LET_GO_S
        while not self._queue.is_idle():
            if time.monotonic() > deadline_s:
                raise EngineError(
                    f"vLLM still has requests of an earlier run after {_LET_GO_S:g} s; open the engine anew."
                )
            time.sleep(_LOOK_EVERY_S)
        return self._queue.start(make_policy(policy, plan, self._limits), plan.revision)

    def revise(self, plan: Plan) -> None:
        """See `SchedulerControl`."""
        with self._queue.lock:
            self._queue.policy.revise(plan)
            self._queue.revision = plan.revision

    def upcoming(self, num_requests: int) -> Sequence[int]:
        """See `SchedulerControl`."""
        with self._queue.lock:
            return self._queue.policy.upcoming(num_requests)

    def withdraw(self, seqs: Sequence[int], queued: Sequence[int]) -> None:
        """See `SchedulerControl`."""
        with self._queue.lock:
            self._queue.withdraw(seqs, queued)

    def release(self, seqs: Sequence[int]) -> tuple[int, ...]:
        """See `SchedulerControl`."""
        with self._queue.lock:
            return self._queue.release(seqs)

    def tell_all(self) -> None:
        """See `SchedulerControl`."""
        self._reports.tell_all()
