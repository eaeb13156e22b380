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


@dataclass(slots=True)
class WindowSums:
    """Totals over the steps of an open window; fields mean what `StepRecord`'s of the same name mean.

    Attributes:
        num_steps: steps added.
        predicted_s: the performance model's time for them.
    """

    num_steps: int = 0
    duration_s: float = 0.0
    predicted_s: float = 0.0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    prefill_tokens_sq: int = 0
    decode_kv_tokens: int = 0
    kv_usage: float = 0.0
    num_running_left: int = 0
    num_running_right: int = 0
    num_preempted: int = 0
    num_finished: int = 0


class WindowAccumulator:
    """Adds steps up to windows of 64 steps or 1 s, never across a plan revision.

    Call `add` after each step, `revise` when a plan revision comes into force and `flush` at the end; each
    returns the window that it closed, if any. Idle time between steps counts for the window's second, not for
    its duration. A simulator, whose steps take as long as predicted, adds to the sums itself and then calls
    `close_if_full`.

    Attributes:
        started_at: start of the window's first step; without meaning while there is none.
        sums: totals of its steps.
    """

    __slots__ = ("_batch_index", "_device", "_model", "_overlap", "_revision", "_times", "started_at", "sums")

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
        self.started_at = 0.0
        self.sums = WindowSums()

    @property
    def num_steps(self) -> int:
        """Steps since the last window."""
        return self.sums.num_steps

    def add(self, step: StepRecord) -> StepWindow | None:
        """Adds a step; returns the window when the step completes it."""
        sums = self.sums
        if sums.num_steps == 0:
            self.started_at = step.started_at
        sums.num_steps += 1
        sums.duration_s += step.duration_s
        sums.predicted_s += self._times.step_s(
            step.num_prefill_tokens + step.num_decode_tokens,
            step.prefill_tokens_sq,
            step.decode_kv_tokens,
            overlap=self._overlap,
        )
        sums.num_prefill_tokens += step.num_prefill_tokens
        sums.num_decode_tokens += step.num_decode_tokens
        sums.num_cached_tokens += step.num_cached_tokens
        sums.num_recomputed_tokens += step.num_recomputed_tokens
        sums.prefill_tokens_sq += step.prefill_tokens_sq
        sums.decode_kv_tokens += step.decode_kv_tokens
        sums.kv_usage += step.kv_usage
        sums.num_running_left += step.num_running_left
        sums.num_running_right += step.num_running_right
        sums.num_preempted += step.num_preempted
        sums.num_finished += step.num_finished
        return self.close_if_full(step.started_at + step.duration_s)

    def close_if_full(self, ended_at: float) -> StepWindow | None:
        """Closes the window if its last step, which ended then, completes it."""
        if self.sums.num_steps >= MAX_WINDOW_STEPS or ended_at - self.started_at >= MAX_WINDOW_S:
            return self.flush()
        return None

    def revise(self, revision: int) -> StepWindow | None:
        """Puts a plan revision in force; returns the window of the steps before it."""
        window = self.flush()
        self._revision = revision
        return window

    def flush(self) -> StepWindow | None:
        """Closes the window; None where no step was added since the last one."""
        sums = self.sums
        if sums.num_steps == 0:
            return None
        self.sums = WindowSums()
        cost = step_cost(
            self._model,
            self._device,
            sums.num_prefill_tokens + sums.num_decode_tokens,
            sums.prefill_tokens_sq,
            sums.decode_kv_tokens,
        )
        window = StepWindow(
            batch_index=self._batch_index,
            revision=self._revision,
            started_at=self.started_at,
            duration_s=sums.duration_s,
            predicted_s=sums.predicted_s,
            num_steps=sums.num_steps,
            num_prefill_tokens=sums.num_prefill_tokens,
            num_decode_tokens=sums.num_decode_tokens,
            num_cached_tokens=sums.num_cached_tokens,
            num_recomputed_tokens=sums.num_recomputed_tokens,
            prefill_tokens_sq=sums.prefill_tokens_sq,
            decode_kv_tokens=sums.decode_kv_tokens,
            compute_s=cost.compute_s,
            memory_s=cost.memory_s,
            kv_usage=sums.kv_usage / sums.num_steps,
            num_running_left=sums.num_running_left / sums.num_steps,
            num_running_right=sums.num_running_right / sums.num_steps,
            num_preempted=sums.num_preempted,
            num_finished=sums.num_finished,
        )
        self._batch_index += 1
        return window
