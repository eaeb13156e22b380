"""What the scheduler tells a run: who starts, and what steps did. No vLLM here."""

from collections.abc import Callable
from threading import Lock
from typing import Final, NamedTuple

from blend_core.engines.vllm.flight import StepCounts
from blend_core.engines.windows import StepRecord

STEPS_AT_ONCE: Final = 64
LONGEST_WAIT_S: Final = 0.5
"""Steps are told together: a message takes as long as all else that we add to a step."""


class Admitted(NamedTuple):
    """Requests that the next step is the first to compute; told before it does.

    Attributes:
        seqs: in the order of their admission.
        revision: plan revision in force.
    """

    seqs: tuple[int, ...]
    revision: int


class CountedStep(NamedTuple):
    """A step as it was scheduled. A plain tuple, as below: one is made in every step.

    Attributes:
        run: number of the run that it was scheduled for.
        revision: plan revision in force.
        started_at: see `StepRecord`.
        counts: what it computes.
        num_cached_tokens: see `StepRecord`.
        kv_usage: see `StepRecord`.
        num_running_left: see `StepRecord`.
        num_running_right: see `StepRecord`.
        num_preempted: see `StepRecord`.
    """

    run: int
    revision: int
    started_at: float
    counts: StepCounts
    num_cached_tokens: int
    kv_usage: float
    num_running_left: int
    num_running_right: int
    num_preempted: int


class Stepped(NamedTuple):
    """A step that is through.

    Attributes:
        step: what was scheduled.
        duration_s: from where the step before it ended, where they overlap.
        num_finished: see `StepRecord`.
        added_s: what steps waited for our part of the scheduler since the step before.
        beside_s: what our part did, since then, while a step was computed.
        asked_in_vain: the policy asked for a request that vLLM has not got.
    """

    step: CountedStep
    duration_s: float
    num_finished: int
    added_s: float
    beside_s: float
    asked_in_vain: bool

    def record(self) -> StepRecord:
        """The step as windows count it."""
        step, counts = self.step, self.step.counts
        return StepRecord(
            started_at=step.started_at,
            duration_s=self.duration_s,
            num_prefill_tokens=counts.num_prefill_tokens,
            num_decode_tokens=counts.num_decode_tokens,
            num_cached_tokens=step.num_cached_tokens,
            num_recomputed_tokens=counts.num_recomputed_tokens,
            prefill_tokens_sq=counts.prefill_tokens_sq,
            decode_kv_tokens=counts.decode_kv_tokens,
            kv_usage=step.kv_usage,
            num_running_left=step.num_running_left,
            num_running_right=step.num_running_right,
            num_preempted=step.num_preempted,
            num_finished=self.num_finished,
        )


Report = Admitted | Stepped


class StepReports:
    """Tells steps when there are enough of them, the first has waited for long, or something was missing.

    Telling lets other threads of the process go first, which may be busy for milliseconds: it is for when a
    step is being computed. Any thread may call.
    """

    def __init__(self, tell: Callable[[list[Stepped]], None]) -> None:
        """`tell` gets steps in their order; it is never called by two threads at once."""
        self._tell = tell
        self._steps: list[Stepped] = []
        self._is_urgent = False
        self._lock = Lock()

    def add(self, step: Stepped) -> None:
        """A step is through. It is told when `tell_due` is called next, if it is due then."""
        with self._lock:
            self._steps.append(step)
            self._is_urgent = self._is_urgent or step.asked_in_vain

    def tell_due(self) -> None:
        """Tells the steps that were not told yet, if it is time."""
        with self._lock:
            if self._is_urgent or len(self._steps) >= STEPS_AT_ONCE or self._waited_s() >= LONGEST_WAIT_S:
                self._tell_steps()

    def tell_all(self) -> None:
        """Tells the steps that were not told yet."""
        with self._lock:
            if self._steps:
                self._tell_steps()

    def _tell_steps(self) -> None:
        steps, self._steps = self._steps, []
        self._is_urgent = False
        self._tell(steps)

    def _waited_s(self) -> float:
        if not self._steps:
            return 0.0
        latest = self._steps[-1]
        return latest.step.started_at + latest.duration_s - self._steps[0].step.started_at
