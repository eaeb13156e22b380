"""What a run asks of the scheduler, and what the scheduler tells of its steps. No vLLM here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from blend_core.engines.vllm.admission_queue import AdmissionQueue
from blend_core.engines.vllm.flight import StepCounts
from blend_core.engines.windows import StepRecord
from blend_core.plan import Plan
from blend_core.policies.base import EngineLimits
from blend_core.policies.factory import make_policy


@dataclass(frozen=True, slots=True)
class Admitted:
    """Requests that the next step is the first to compute; told before it does.

    Attributes:
        seqs: in the order of their admission.
        revision: plan revision in force.
    """

    seqs: tuple[int, ...]
    revision: int


class Stepped(NamedTuple):
    """One step that is through. A plain tuple: one is made, and sent, in every step.

    Attributes:
        counts: what it computed; None of a step that computed nothing.
        revision: plan revision in force when it was scheduled.
        has_outputs: whether vLLM sends outputs of it.
        started_at: see `StepRecord`.
        duration_s: from where the step before it ended, where they overlap.
        num_cached_tokens: see `StepRecord`.
        kv_usage: see `StepRecord`.
        num_running_left: see `StepRecord`.
        num_running_right: see `StepRecord`.
        num_preempted: see `StepRecord`.
        num_finished: see `StepRecord`.
        added_s: what our part of the scheduler took of it.
        asked_in_vain: the policy asked for a request that vLLM has not got.
    """

    counts: StepCounts | None
    revision: int
    has_outputs: bool
    started_at: float = 0.0
    duration_s: float = 0.0
    num_cached_tokens: int = 0
    kv_usage: float = 0.0
    num_running_left: int = 0
    num_running_right: int = 0
    num_preempted: int = 0
    num_finished: int = 0
    added_s: float = 0.0
    asked_in_vain: bool = False

    def record(self) -> StepRecord | None:
        """The step as windows count it."""
        counts = self.counts
        if counts is None:
            return None
        return StepRecord(
            started_at=self.started_at,
            duration_s=self.duration_s,
            num_prefill_tokens=counts.num_prefill_tokens,
            num_decode_tokens=counts.num_decode_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_recomputed_tokens=counts.num_recomputed_tokens,
            prefill_tokens_sq=counts.prefill_tokens_sq,
            decode_kv_tokens=counts.decode_kv_tokens,
            kv_usage=self.kv_usage,
            num_running_left=self.num_running_left,
            num_running_right=self.num_running_right,
            num_preempted=self.num_preempted,
            num_finished=self.num_finished,
        )


Report = Admitted | Stepped


class SchedulerControl(Protocol):
    """The scheduler, as a run sees it."""

    def limits(self) -> EngineLimits:
        """What the policy must respect, in the policy's unit of blocks."""

    def start(self, policy: str, plan: Plan) -> None:
        """Begins a run under the named policy. Raises `PlanError` for a plan of another block size."""

    def revise(self, plan: Plan) -> None:
        """Puts a later plan in force. Raises `PlanError` where it is not later."""

    def upcoming(self, num_requests: int) -> Sequence[int]:
        """Seqs that may be asked for next, as `AdmissionPolicy.upcoming` says."""

    def drop(self, seqs: Sequence[int]) -> None:
        """These requests, which vLLM never got, will not come."""

    def release(self, seqs: Sequence[int]) -> tuple[int, ...]:
        """Lets go of requests that wait, to be queued again later; returns those it let go of."""


class LocalControl:
    """A `SchedulerControl` over a queue in this process. Safe to use from another thread than vLLM's."""

    def __init__(self, queue: AdmissionQueue, limits: EngineLimits) -> None:
        self._queue = queue
        self._limits = limits

    def limits(self) -> EngineLimits:
        """See `SchedulerControl`."""
        return self._limits

    def start(self, policy: str, plan: Plan) -> None:
        """See `SchedulerControl`."""
        self._queue.start(make_policy(policy, plan, self._limits), plan.revision)

    def revise(self, plan: Plan) -> None:
        """See `SchedulerControl`."""
        with self._queue.lock:
            self._queue.policy.revise(plan)
            self._queue.revision = plan.revision

    def upcoming(self, num_requests: int) -> Sequence[int]:
        """See `SchedulerControl`."""
        with self._queue.lock:
            return self._queue.policy.upcoming(num_requests)

    def drop(self, seqs: Sequence[int]) -> None:
        """See `SchedulerControl`."""
        with self._queue.lock:
            for seq in seqs:
                self._queue.policy.finished(seq, 0)

    def release(self, seqs: Sequence[int]) -> tuple[int, ...]:
        """See `SchedulerControl`."""
        with self._queue.lock:
            return self._queue.release(seqs)
