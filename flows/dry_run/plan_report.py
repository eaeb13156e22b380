"""A forecast for people, as sentences, tables and bars, and for programs, as one object."""

from dataclasses import asdict, dataclass
from typing import Any

from blend_core.wording import count_text, duration_text
from flows.dry_run.forecast import Forecast, faster_policy
from flows.dry_run.plan_sentences import assumption_text, deadline_text, faster_text, target_text
from flows.dry_run.plan_tables import density_chart, policy_table
from flows.dry_run.workload import Workload
from flows.tables import percent_text

Fact = tuple[str, str]


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
    def is_sample(self) -> bool:
        """Whether a part of the requests was simulated for all of them."""
        return self.forecast.expected.num_simulated < self.forecast.summary.num_requests

    @property
    def assumption(self) -> str:
        """What the lengths of the answers rest on."""
        return assumption_text(self.workload.lengths, self.expected_output_tokens)


def plan_text(report: PlanReport) -> str:
    """The dry run for a terminal."""
    told = report.forecast
    rows = [*_basis(report), *_findings(told), *_reservations(report)]
    facts = "\n".join(f"{name:<10}{text}" for name, text in rows)
    return f"{facts}\n\n{policy_table(told)}\n\n{density_chart(told.density_bins)}"


def plan_json(report: PlanReport) -> dict[str, Any]:
    """The dry run for a program; docs/plan.md says what each value is."""
    told, workload = report.forecast, report.workload
    target, lengths, expected = workload.target, workload.lengths, report.forecast.expected
    return {
        "source": report.source,
        "invalid": report.num_bad,
        "num_refused": workload.num_refused,
        "error_codes": report.bad_by_code,
        "counted_with_tokenizer": report.counted_with_tokenizer,
        "model": target.model.name,
        "device": target.device.name,
        "tensor_parallel": target.tensor_parallel,
        "num_kv_tokens": target.limits.num_blocks * target.limits.block_size,
        "engine": report.engine,
        "engine_name": target.engine,
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
        "is_sample": report.is_sample,
        "summary": asdict(told.summary),
        "policies": [asdict(entry) for entry in told.policies],
        "density_histogram": [asdict(entry) for entry in told.density_bins],
        "deadline": None if told.deadline is None else asdict(told.deadline),
    }


def _basis(report: PlanReport) -> list[Fact]:
    """What the forecast rests on."""
    summary, workload = report.forecast.summary, report.workload
    counted = "" if report.counted_with_tokenizer else " (four bytes of text taken for a token)"
    return [
        ("requests", f"{summary.num_requests:,} to run, {_bad_text(report)}"),
        (
            "tokens",
            f"{summary.num_prompt_tokens:,} of prompts{counted}, "
            f"{summary.estimated_output_tokens:,.0f} of answers",
        ),
        ("assumed", report.assumption),
        ("engine", target_text(workload.target, overlap=workload.overlap)),
    ]


def _findings(told: Forecast) -> list[Fact]:
    """What came of it."""
    summary = told.summary
    return [
        (
            "expected",
            f"{duration_text(told.expected.estimated_duration_s)} under {told.policy}; practical optimum "
            f"{duration_text(summary.optimum_s)} (ideal overlap)",
        ),
        (
            "sharing",
            f"{percent_text(summary.prefix_sharing_planned)} of prompt tokens planned, at best "
            f"{percent_text(summary.prefix_sharing_best)}",
        ),
        ("density", f"{summary.density:.2f} (compute over memory seconds)"),
    ]


def _reservations(report: PlanReport) -> list[Fact]:
    """The deadline, and how far the figures hold; nothing where there is nothing to say."""
    told, num_devices = report.forecast, report.workload.target.tensor_parallel
    rows: list[Fact] = []
    faster = faster_policy(told)
    if not report.is_sample and faster is not None:
        rows.append(("policy", faster_text(faster, told.expected)))
    # A sample's duration may come out under the optimum, too, and that says nothing about the optimum.
    if not report.is_sample and max(entry.fraction_of_optimum for entry in told.policies) > 1:
        rows.append(
            (
                "optimum",
                "a target and no bound: it counts a step for the first token of an answer, too, which comes "
                "with the prompt",
            )
        )
    if num_devices > 1:
        rows.append(
            (
                "parallel",
                f"the weights take {num_devices} devices by tensor parallelism, whose communication is not "
                "counted",
            )
        )
    if told.deadline is not None:
        rows.append(("deadline", deadline_text(told.deadline)))
    if report.is_sample:
        rows.append(
            (
                "sample",
                f"some {told.expected.num_simulated:,} of {told.summary.num_requests:,} requests were "
                "simulated, and what grows with the work was scaled by their share of it; policies within a "
                "few percent of one another are not ranked by that",
            )
        )
    num_refused = report.workload.num_refused
    if num_refused:
        needs, it = ("needs", "it") if num_refused == 1 else ("need", "them")
        rows.append(
            (
                "too large",
                f"{count_text(num_refused, 'request')} {needs} more KV for prompt and max_tokens than there "
                f"is; a job refuses {it}",
            )
        )
    return rows


def _bad_text(report: PlanReport) -> str:
    """How many lines or rows will not run, and why, the most frequent reason first."""
    codes = sorted(report.bad_by_code.items(), key=lambda item: (-item[1], item[0]))
    why = ", ".join(f"{number:,} {code}" for code, number in codes)
    return count_text(report.num_bad, "bad line") + (f" ({why})" if why else "")
