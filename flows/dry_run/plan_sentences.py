"""Sentences of a forecast: what it assumes, what runs it, and what a deadline takes."""

from blend_core.wording import count_text, duration_text
from flows.dry_run.deadline import MAX_NUM_REPLICAS
from flows.dry_run.forecast import DeadlineForecast, PolicyForecast
from flows.dry_run.lengths import AnswerLengths, LengthBasis
from flows.dry_run.target import Target
from flows.tables import percent_text


def assumption_text(lengths: AnswerLengths, expected_tokens: int | None) -> str:
    """What the answers' lengths rest on, in one sentence."""
    hidden = len(lengths.actual) - lengths.num_preset
    if lengths.basis is LengthBasis.RECORDED:
        return (
            f"{lengths.num_recorded:,} answers are as long as the job recorded; to the planner they are "
            "samples of one another"
        )
    if lengths.basis is LengthBasis.EARLIER_NIGHTS:
        rest = hidden - lengths.num_recorded
        others = f"; the other {rest:,} have any length up to their max_tokens" if rest else ""
        return (
            f"{lengths.num_recorded:,} answers are as long as those to the same prompt template on earlier "
            f"nights{others}"
        )
    if hidden == 0:
        return "every answer's length is fixed by its request"
    which = "answers" if lengths.num_preset == 0 else f"the {hidden:,} answers of no fixed length"
    if lengths.basis is LengthBasis.EXPECTED:
        mean = count_text(expected_tokens or 0, "token")
        planned = round(float(lengths.estimates.mean[~lengths.estimates.known].mean()))
        cut = "" if planned == expected_tokens else f": {planned:,} in the mean within these bounds"
        return f"{which} have {mean} in the mean, and none more than its max_tokens{cut}"
    return (
        f"{which} have any length up to their max_tokens, half of it in the mean; "
        "say --expected-output-tokens if you know better"
    )


def target_text(target: Target, *, overlap: bool) -> str:
    """Engine, model and device in one line."""
    engine = "overlap (decode attention beside GEMM)" if overlap else "sequential"
    if target.engine is not None:
        engine = f"{target.engine}, simulated as {engine}"
    num_tokens = target.limits.num_blocks * target.limits.block_size
    return f"{engine}, {target.model.name} on {target.device.name}, room for {num_tokens:,} tokens of KV"


def faster_text(faster: PolicyForecast, expected: PolicyForecast) -> str:
    """A policy that beats the job's, in one sentence."""
    less = 1.0 - faster.estimated_duration_s / expected.estimated_duration_s
    return (
        f"{faster.policy} takes {duration_text(faster.estimated_duration_s)}, {percent_text(less)} less; "
        "a job names it in options.policy"
    )


def deadline_text(found: DeadlineForecast) -> str:
    """Devices for the deadline in one sentence."""
    limit = duration_text(found.deadline_s)
    takes = duration_text(found.estimated_duration_s)
    if found.num_replicas is None or found.num_devices is None:
        reason = (
            "give it more time, or a larger device"
            if found.max_num_replicas == MAX_NUM_REPLICAS
            else "there are no more requests to share"
        )
        return (
            f"no number of replicas up to {found.max_num_replicas} is done within {limit}: "
            f"{found.max_num_replicas} take {takes}; {reason}"
        )
    replicas, devices = count_text(found.num_replicas, "replica"), count_text(found.num_devices, "device")
    return f"{devices} ({replicas}) for {limit}: the slowest takes {takes} under {found.policy}"
