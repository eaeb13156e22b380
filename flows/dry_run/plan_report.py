"""A forecast for people, as sentences, tables and bars, and for programs, as one object."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

from blend_core.wording import count_text, duration_text, seconds_text
from flows.dry_run.deadline import MAX_NUM_REPLICAS
from flows.dry_run.forecast import DeadlineForecast, Forecast
from flows.dry_run.histogram import DensityBin
from flows.dry_run.lengths import AnswerLengths, LengthBasis
from flows.dry_run.target import Target
from flows.dry_run.workload import Workload
from flows.tables import percent_text, text_table

BAR_WIDTH: Final = 24
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All that a dry run tells.

    Attributes:
        source: what was planned.
        num_bad: lines that would become error rows.
        bad_by_code: the same by error code; empty where the job has recorded them.
        counted_with_tokenizer: whether tokens are the model's own.
        expected_output_tokens: as given; None where nothing was.
        workload: what was simulated.
        forecast: what came of it.
    """

    source: str
    num_bad: int
    bad_by_code: dict[str, int]
    counted_with_tokenizer: bool
    expected_output_tokens: int | None
    workload: Workload
    forecast: Forecast

    @property
    def engine(self) -> str:
        """The kind of engine that was simulated."""
        return "overlap" if self.workload.overlap else "sequential"

    @property
    def assumption(self) -> str:
        """What the lengths of the answers rest on."""
        return assumption_text(self.workload.lengths, self.expected_output_tokens)


def plan_text(report: PlanReport) -> str:
    """The dry run for a terminal."""
    told, workload, summary = report.forecast, report.workload, report.forecast.summary
    expected = told.expected
    counted = "" if report.counted_with_tokenizer else " (four bytes of text taken for a token)"
    rows = [
        ("requests", f"{summary.num_requests:,} to run, {_bad_text(report)}"),
        (
            "tokens",
            f"{summary.num_prompt_tokens:,} of prompts{counted}, "
            f"{summary.estimated_output_tokens:,.0f} of answers",
        ),
        ("assumed", report.assumption),
        ("engine", target_text(workload.target, overlap=workload.overlap)),
        (
            "expected",
            f"{duration_text(expected.estimated_duration_s)} under {told.policy}; practical optimum "
            f"{duration_text(summary.optimum_s)} (ideal overlap)",
        ),
        (
            "sharing",
            f"{percent_text(summary.prefix_sharing_planned)} of prompt tokens planned, at best "
            f"{percent_text(summary.prefix_sharing_best)}",
        ),
        ("density", f"{summary.density:.2f} (compute over memory seconds)"),
    ]
    if max(entry.fraction_of_optimum for entry in told.policies) > 1:
        rows.append(
            (
                "optimum",
                "a target and no bound: it counts a step for the first token of an answer, too, which comes "
                "with the prompt",
            )
        )
    if workload.target.tensor_parallel > 1:
        rows.append(
            (
                "parallel",
                f"the weights take {workload.target.tensor_parallel} devices by tensor parallelism, whose "
                "communication is not counted",
            )
        )
    if told.deadline is not None:
        rows.append(("deadline", deadline_text(told.deadline)))
    if expected.num_simulated < summary.num_requests:
        rows.append(
            (
                "sample",
                f"some {expected.num_simulated:,} of {summary.num_requests:,} requests were simulated, and "
                "their duration scaled by their share of the work",
            )
        )
    if expected.num_refused:
        need = "needs" if expected.num_refused == 1 else "need"
        rows.append(
            ("too large", f"{count_text(expected.num_refused, 'request')} {need} more KV than there is")
        )
    facts = "\n".join(f"{name:<10}{text}" for name, text in rows)
    return f"{facts}\n\n{policy_table(told)}\n\n{density_chart(told.density_bins)}"


def plan_json(report: PlanReport) -> dict[str, Any]:
    """The dry run for a program; docs/plan.md says what each value is."""
    told, workload = report.forecast, report.workload
    target, lengths, expected = workload.target, workload.lengths, report.forecast.expected
    return {
        "source": report.source,
        "invalid": report.num_bad,
        "error_codes": report.bad_by_code,
        "counted_with_tokenizer": report.counted_with_tokenizer,
        "model": target.model.name,
        "device": target.device.name,
        "tensor_parallel": target.tensor_parallel,
        "num_kv_tokens": target.limits.num_blocks * target.limits.block_size,
        "engine": report.engine,
        "output_lengths": {
            "basis": lengths.basis.value,
            "assumption": report.assumption,
            "expected_output_tokens": report.expected_output_tokens,
            "num_preset": lengths.num_preset,
            "num_recorded": lengths.num_recorded,
        },
        "policy": told.policy,
        "estimated_duration_s": expected.estimated_duration_s,
        "optimum_s": told.summary.optimum_s,
        "num_simulated": expected.num_simulated,
        "is_sample": expected.num_simulated < told.summary.num_requests,
        "summary": asdict(told.summary),
        "policies": [asdict(entry) for entry in told.policies],
        "density_histogram": [asdict(entry) for entry in told.density_bins],
        "deadline": None if told.deadline is None else asdict(told.deadline),
    }


def _bad_text(report: PlanReport) -> str:
    """How many lines or rows will not run, and why, the most frequent reason first."""
    codes = sorted(report.bad_by_code.items(), key=lambda item: (-item[1], item[0]))
    why = ", ".join(f"{number:,} {code}" for code, number in codes)
    return count_text(report.num_bad, "bad line") + (f" ({why})" if why else "")


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
        return f"{which} have {mean} in the mean, and none more than its max_tokens"
    return (
        f"{which} have any length up to their max_tokens, half of it in the mean; "
        "say --expected-output-tokens if you know better"
    )


def target_text(target: Target, *, overlap: bool) -> str:
    """Engine, model and device in one line."""
    engine = "overlap (decode attention beside GEMM)" if overlap else "sequential"
    num_tokens = target.limits.num_blocks * target.limits.block_size
    return f"{engine}, {target.model.name} on {target.device.name}, room for {num_tokens:,} tokens of KV"


def policy_table(told: Forecast) -> str:
    """What each policy takes."""
    headers = ("policy", "duration", "seconds", "of optimum", "sharing planned", "simulated", "preempted")
    rows = [
        (
            entry.policy,
            duration_text(entry.estimated_duration_s),
            seconds_text(entry.estimated_duration_s, num_decimals=1),
            percent_text(entry.fraction_of_optimum),
            percent_text(entry.prefix_sharing),
            # That of a sample is not that of the whole: its stretches share more, or less.
            "-" if entry.num_simulated < told.summary.num_requests else percent_text(entry.simulated_sharing),
            entry.num_preempted,
        )
        for entry in told.policies
    ]
    return text_table(headers, rows)


def density_chart(bins: tuple[DensityBin, ...]) -> str:
    """Requests by density: their share of the requests and of the work, as bars on one scale."""
    total = sum(entry.num_requests for entry in bins)
    total_s = sum(entry.compute_s + entry.memory_s for entry in bins)
    shares = [(entry.num_requests / total, (entry.compute_s + entry.memory_s) / total_s) for entry in bins]
    largest = max(max(pair) for pair in shares)
    rows = [
        (
            _range_text(entry),
            entry.num_requests,
            percent_text(of_requests),
            _bar(of_requests / largest),
            percent_text(of_work),
            _bar(of_work / largest),
        )
        for entry, (of_requests, of_work) in zip(bins, shares, strict=True)
    ]
    return text_table(("density", "requests", "share", "", "of the work", ""), rows)


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


def _range_text(entry: DensityBin) -> str:
    if entry.low == 0:
        return "any" if math.isinf(entry.high) else f"under {entry.high:g}"
    if math.isinf(entry.high):
        return f"{entry.low:g} and over"
    return f"{entry.low:g} to {entry.high:g}"


def _bar(share: float) -> str:
    whole, eighths = divmod(round(share * BAR_WIDTH * 8), 8)
    return "█" * whole + (_EIGHTHS[eighths] if eighths else "")
