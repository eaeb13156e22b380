"""From single steps to windows: one accounting for every engine."""

from dataclasses import dataclass
from typing import Final

from blend_core.engines.base import StepWindow
from blend_core.performance import StepTimeModel, step_cost
from blend_core.specs import DeviceProfile, ModelSpec

MAX_WINDOW_STEPS: Final = 64
MAX_WINDOW_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did, as its engine counts it. Fields mean what `StepWindow`'s of the same name mean.

    Attributes:
        started_at: start of the step, seconds since the epoch.
        duration_s: measured wall time of the step.
        num_prefill_tokens: prompt tokens computed, recomputation included.
        num_decode_tokens: output tokens computed by requests that were decoding before the step.
        num_cached_tokens: prompt tokens served from the cache by admissions since the step before.
        num_recomputed_tokens: those of `num_prefill_tokens` computed before a preemption already.
        prefill_tokens_sq: sum over chunks of `(c + t)^2 - c^2`, `t` tokens after `c` earlier ones.
        decode_kv_tokens: sum over decode tokens of the KV tokens read, the new one included.
        kv_usage: share of KV blocks that requests in flight refer to, 0 to 1.
        num_running_left: requests in flight from the left side.
        num_running_right: requests in flight from the right side.
        num_preempted: preemptions since the step before.
        num_finished: requests that ended with the step.
    """

    started_at: float
    duration_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_cached_tokens: int
    num_recomputed_tokens: int
    prefill_tokens_sq: int
    decode_kv_tokens: int
    kv_usage: float
    num_running_left: int
    num_running_right: int
    num_preempted: int
    num_finished: int


class WindowAccumulator:
    """Adds steps up to windows of 64 steps or 1 s, never across a plan revision.

    Call `add` after each step, `revise` when a plan revision comes into force and `flush` at the end; each
    returns the window that it closed, if any. Idle time between steps counts for the window's second, not for
    its duration.
    """

    __slots__ = (
        "_batch_index",
        "_device",
        "_model",
        "_overlap",
        "_revision",
        "_steps",
        "_times",
    )

    def __init__(self, model: ModelSpec, device: DeviceProfile, revision: int, *, overlap: bool) -> None:
        """Begins at batch index 0.

        Args:
            model: what the steps' costs are reckoned for.
            device: what the steps' costs are reckoned on.
            revision: plan revision in force.
            overlap: whether the engine runs decode attention beside compute; it changes `predicted_s` only.
        """
        self._model = model
        self._device = device
        self._revision = revision
        self._overlap = overlap
        self._times = StepTimeModel.of(model, device)
        self._batch_index = 0
        self._steps: list[StepRecord] = []

    def add(self, step: StepRecord) -> StepWindow | None:
        """Adds a step; returns the window when the step completes it."""
        self._steps.append(step)
        elapsed_s = step.started_at + step.duration_s - self._steps[0].started_at
        if len(self._steps) >= MAX_WINDOW_STEPS or elapsed_s >= MAX_WINDOW_S:
            return self.flush()
        return None

    def revise(self, revision: int) -> StepWindow | None:
        """Puts a plan revision in force; returns the window of the steps before it."""
        window = self.flush()
        self._revision = revision
        return window

    def flush(self) -> StepWindow | None:
        """Closes the window; None where no step was added since the last one."""
        steps = self._steps
        if not steps:
            return None
        self._steps = []
        num_prefill_tokens = sum(step.num_prefill_tokens for step in steps)
        num_decode_tokens = sum(step.num_decode_tokens for step in steps)
        prefill_tokens_sq = sum(step.prefill_tokens_sq for step in steps)
        decode_kv_tokens = sum(step.decode_kv_tokens for step in steps)
        cost = step_cost(
            self._model,
            self._device,
            num_prefill_tokens + num_decode_tokens,
            prefill_tokens_sq,
            decode_kv_tokens,
        )
        window = StepWindow(
            batch_index=self._batch_index,
            revision=self._revision,
            started_at=steps[0].started_at,
            duration_s=sum(step.duration_s for step in steps),
            predicted_s=sum(self._predicted_s(step) for step in steps),
            num_steps=len(steps),
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=num_decode_tokens,
            num_cached_tokens=sum(step.num_cached_tokens for step in steps),
            num_recomputed_tokens=sum(step.num_recomputed_tokens for step in steps),
            prefill_tokens_sq=prefill_tokens_sq,
            decode_kv_tokens=decode_kv_tokens,
            compute_s=cost.compute_s,
            memory_s=cost.memory_s,
            kv_usage=sum(step.kv_usage for step in steps) / len(steps),
            num_running_left=sum(step.num_running_left for step in steps) / len(steps),
            num_running_right=sum(step.num_running_right for step in steps) / len(steps),
            num_preempted=sum(step.num_preempted for step in steps),
            num_finished=sum(step.num_finished for step in steps),
        )
        self._batch_index += 1
        return window

    def _predicted_s(self, step: StepRecord) -> float:
        return self._times.step_s(
            step.num_prefill_tokens + step.num_decode_tokens,
            step.prefill_tokens_sq,
            step.decode_kv_tokens,
            overlap=self._overlap,
        )
