"""What a step did, in the counts that every engine reports."""

from dataclasses import replace

from blend_core.engines.torch.scheduler import ScheduledStep, Scheduler
from blend_core.engines.windows import StepRecord
from blend_core.policies.base import Side


class StepMeter:
    """Counts a step between `schedule` and its end.

    A prompt that is computed again after a preemption ends in a token that no step had computed: it counts as
    the decode token that it would have been. So over a run `prefill - recomputed + cached` is the prompt
    tokens, and decode tokens are the output tokens less one for each answer.
    """

    __slots__ = ("_record",)

    def __init__(self, scheduler: Scheduler, step: ScheduledStep, started_at: float) -> None:
        """Takes the counts that later events change; call before tokens are taken."""
        num_prefill = num_recomputed = squares = 0
        num_decode = len(step.decodes)
        kv_tokens = sum(len(sequence.token_ids) for sequence in step.decodes)
        for sequence, num_tokens in step.prefills:
            start = sequence.num_computed_tokens
            end = start + num_tokens
            if sequence.num_output_tokens and end == len(sequence.token_ids):
                num_decode += 1
                kv_tokens += end
                end -= 1
            num_prefill += end - start
            squares += end * end - start * start
            num_recomputed += max(0, min(end, sequence.num_once_computed_tokens) - start)
        self._record = StepRecord(
            started_at=started_at,
            duration_s=0.0,
            num_prefill_tokens=num_prefill,
            num_decode_tokens=num_decode,
            num_cached_tokens=step.num_cached_tokens,
            num_recomputed_tokens=num_recomputed,
            prefill_tokens_sq=squares,
            decode_kv_tokens=kv_tokens,
            kv_usage=scheduler.kv_usage,
            num_running_left=scheduler.num_running_on(Side.LEFT),
            num_running_right=scheduler.num_running_on(Side.RIGHT),
            num_preempted=step.num_preempted,
            num_finished=0,
        )

    def record(self, duration_s: float, num_finished: int) -> StepRecord:
        """The step's counts, complete."""
        return replace(self._record, duration_s=duration_s, num_finished=num_finished)
