"""A job's report for people: text for the terminal, Markdown for Prefect, and a plot of density over time."""

from collections.abc import Sequence
from pathlib import Path

from blend_core.errors import ConfigurationError
from blend_core.wording import duration_text
from flows.report import BatchDensity, JobReport, merged
from flows.stages.plan import GENERIC_PROFILE
from flows.tables import cell_text, markdown_table, percent_text, text_table
from storage.suspects import EngineDeath

DEATH_HEADERS = ("engine died at", "in flight", "reason")

DENSITY_COLUMNS = (
    "Prefill, cached and decode count tokens; left and right are requests in flight from the two ends of the "
    "plan; KV is the part of the cache in use; planned and measured density are seconds of compute over "
    "seconds of memory."
)


def report_text(report: JobReport) -> str:
    """The whole report as plain text: summary, error rows by code, density per batch."""
    parts = ["\n".join(f"{name:<16} {value}" for name, value in summary_rows(report))]
    if report.error_codes:
        parts.append(text_table(("error code", "rows"), list(report.error_codes.items())))
    if report.engine_deaths:
        parts.append(text_table(DEATH_HEADERS, death_rows(report.engine_deaths)))
    if report.batches:
        parts.append(text_table(density_headers(report), density_rows(report)))
    return "\n\n".join(parts)


def report_markdown(report: JobReport) -> str:
    """The whole report as Markdown, for a Prefect artifact."""
    parts = [f"## Job {report.job_id}", markdown_table(("", ""), summary_rows(report))]
    parts.append(_where_markdown(report))
    if report.error_codes:
        parts += ["### Error rows", markdown_table(("error code", "rows"), list(report.error_codes.items()))]
    if report.engine_deaths:
        parts += ["### Deaths of engines", markdown_table(DEATH_HEADERS, death_rows(report.engine_deaths))]
    if report.batches:
        density = markdown_table(density_headers(report), density_rows(report))
        parts += ["### Density per batch", DENSITY_COLUMNS, density]
    return "\n\n".join(parts)


def _where_markdown(report: JobReport) -> str:
    """Where a reader of Prefect's pages finds the answers themselves."""
    exported = (
        ("answers", report.output_uri),
        ("error rows", report.error_uri),
        ("all requests, as a table", report.table_uri),
    )
    objects = [f"- {what}: `{uri}`" for what, uri in exported if uri is not None]
    query = f"SELECT * FROM request_result WHERE job_id = '{report.job_id}'"  # noqa: S608 - text to copy
    return "\n".join(
        [
            "### Where the answers are",
            *objects,
            f"- in SQL: `{query}`",
            f"- on a terminal: `blend results {report.job_id}`",
        ]
    )


def summary_rows(report: JobReport) -> list[tuple[str, str]]:
    """The report's head as (name, value) pairs."""
    counts, metrics = report.counts, report.metrics
    ended = (
        f"{counts.succeeded:,} succeeded + {counts.errored:,} errored + {counts.expired:,} expired "
        f"+ {counts.cancelled:,} cancelled"
    )
    pending = f" + {counts.pending:,} pending" if counts.pending else ""
    run = "" if report.engine is None else f", engine {report.engine}, policy {report.policy}"
    rows = [
        ("job", f"{report.job_id} ({report.name}), {report.status}, model {report.model}{run}"),
        *([("failure", report.failure)] if report.failure else []),
        *_write_back_rows(report),
        ("requests", f"{ended}{pending} = {counts.total:,}"),
        (
            "tokens",
            f"{metrics.num_prompt_tokens:,} prompt ({metrics.num_cached_tokens:,} from the cache), "
            f"{metrics.num_output_tokens:,} output",
        ),
        (
            "speed",
            f"{cell_text(metrics.tokens_per_s)} tokens/s, {cell_text(metrics.output_tokens_per_s)} output "
            f"tokens/s over {metrics.busy_s:.1f} s in {metrics.num_batches:,} batches",
        ),
        *_time_rows(report),
        (
            "prefix sharing",
            f"planned {percent_text(report.planned_sharing)}, "
            f"measured {percent_text(metrics.prefix_sharing)}, "
            f"best {percent_text(report.best_sharing)}",
        ),
    ]
    if report.density is not None:
        what_if = ""
        if report.what_if_device is not None:
            what_if = f"; the same work on {report.what_if_device}: {cell_text(report.what_if_density)}"
        rows.append(("density", f"{cell_text(report.density)} on {report.device}{what_if}"))
        if report.device == GENERIC_PROFILE:
            rows.append(("", "`cpu` is a generic profile; `blend profile` measures this machine"))
    return rows


def _time_rows(report: JobReport) -> list[tuple[str, str]]:
    if report.took_s is None:
        return []
    at_work = f"; the engine worked in {report.metrics.busy_s:.1f} s of it" if report.metrics.busy_s else ""
    return [("time", f"{duration_text(report.took_s)} from submission to end{at_work}")]


def _write_back_rows(report: JobReport) -> list[tuple[str, str]]:
    if report.write_back_error is None:
        return []
    again = f"`blend write-back {report.job_id}` does it again"
    return [("not written back", f"{report.write_back_error} {again}")]


def death_rows(deaths: Sequence[EngineDeath]) -> list[tuple[object, ...]]:
    """The table under `DEATH_HEADERS`."""
    return [(f"{death.died_at:%Y-%m-%d %H:%M:%S}", death.num_in_flight, death.reason) for death in deaths]


def density_headers(report: JobReport) -> tuple[str, ...]:
    """Column names of the density table."""
    what_if = (f"on {report.what_if_device}",) if report.what_if_device is not None else ()
    names = ("batches", "at s", "prefill", "cached", "decode", "left", "right", "KV", "planned")
    return (*names, f"on {report.device or 'this device'}", *what_if)


def density_rows(report: JobReport) -> list[tuple[object, ...]]:
    """The density table: consecutive batches in at most a dozen rows."""
    has_what_if = report.what_if_device is not None
    return [_density_row(group, has_what_if) for group in merged(report.batches)]


def _density_row(group: BatchDensity, has_what_if: bool) -> tuple[object, ...]:
    one = group.first_batch == group.last_batch
    return (
        str(group.first_batch) if one else f"{group.first_batch}-{group.last_batch}",
        f"{group.started_s:.1f}",
        group.num_prefill_tokens,
        group.num_cached_tokens,
        group.num_decode_tokens,
        f"{group.num_running_left:.1f}",
        f"{group.num_running_right:.1f}",
        f"{group.kv_usage:.0%}",
        group.planned_density,
        group.density,
        *((group.what_if_density,) if has_what_if else ()),
    )


def density_plot(report: JobReport, path: Path) -> None:
    """Draws density over time into `path`; the ending (`.png`, `.svg`) names the format.

    Raises:
        ConfigurationError: matplotlib is not installed, the ending is unknown, there is nothing to draw, or
            the file cannot be written.
    """
    if path.suffix not in (".png", ".svg"):
        raise ConfigurationError(f"A plot is written as .png or .svg; {path.name} is neither.")
    if not report.batches:
        raise ConfigurationError(f"Job {report.job_id} has no batches to draw yet; run it first.")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            "Plots need matplotlib; install it with: pip install 'blendserve[plot]'."
        ) from None

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    times = [batch.started_s + batch.duration_s / 2 for batch in report.batches]
    lines: list[tuple[str, Sequence[float | None]]] = [
        (f"measured on {report.device}", [batch.density for batch in report.batches]),
        ("planned", [batch.planned_density for batch in report.batches]),
    ]
    if report.what_if_device is not None:
        lines.append(
            (f"what-if {report.what_if_device}", [batch.what_if_density for batch in report.batches])
        )
    for label, values in lines:
        if any(value is not None for value in values):
            axes.plot(
                times, [float("nan") if value is None else value for value in values], label=label, lw=1.4
            )
    axes.axhline(1.0, color="grey", lw=0.8, ls="--")
    axes.set_yscale("log")
    axes.set_xlabel("seconds since the first batch")
    axes.set_ylabel("compute density (compute s / memory s)")
    axes.set_title(f"Density of the batches, {report.job_id}")
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigurationError(
            f"The plot cannot be written to {path} ({error.strerror}); name a file in a folder that is there."
        ) from None
