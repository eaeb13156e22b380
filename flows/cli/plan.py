"""`blend plan`: what a job would take, before anything runs."""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer

from flows.cli.output import Json, print_json, print_line, tell
from flows.numbers import MAX_TOKENS

SECONDS_BETWEEN_NOTES = 3.0


class EngineKind(StrEnum):
    """What a simulated engine does at one time."""

    SEQUENTIAL = "sequential"
    OVERLAP = "overlap"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(plan)


def plan(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[SOURCE]",
            help="OpenAI Batch JSONL (plain, gzip or zstd) or Parquet: a local file or s3://bucket/key; or a "
            "job file, .yaml.",
            show_default=False,
        ),
    ] = None,
    job_id: Annotated[
        str | None,
        typer.Option(
            "--job-id", metavar="JOB", help="Plan the requests of this job, with the lengths it recorded."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model of the store, a Hugging Face folder, or a preset such as llama-3.1-8b; by default "
            "the job's, else smollm2-135m."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device profile by name (a100-80g, h100, h200, l4) or TOML file; by default this machine's."
        ),
    ] = None,
    engine: Annotated[
        EngineKind,
        typer.Option(help="Simulate an engine that computes in sequence, or one that overlaps."),
    ] = EngineKind.SEQUENTIAL,
    deadline: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Tell how many devices are done within TIME: 6h, 90m, 1h30m."),
    ] = None,
    expected_output_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_TOKENS,
            metavar="N",
            help="Mean length of the answers; by default half of each `max_tokens`.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_TOKENS,
            help="Longest answer of a request that does not say `max_tokens`; default: the job's, or 256.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Count four bytes as a token, and simulate some 4,000 of more than 5,000 requests.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Tell what a job would take; runs nothing.

    Duration and prefix sharing under each policy, the practical optimum of ideal overlap, how dense the
    requests are, and with --deadline how many devices are needed.

    How long answers will be is not known before they are written, so a plan assumes it and says what it
    assumed. Say --expected-output-tokens if you know better; --job-id uses what a job recorded, and a job
    file or a job without answers what earlier nights of the same prompt templates did.

    A model that one device does not hold is planned on several by tensor parallelism. Of more than 50,000
    requests a sample of about 20,000 is simulated. Local files need no services, presets no model files:
    without a tokenizer four bytes of text count as a token. More in docs/plan.md.

    \b
    Examples:
      blend plan requests.jsonl
      blend plan requests.jsonl.gz --model llama-3.1-8b --device a100-80g --deadline 6h
      blend plan night.yaml --model llama-3.1-70b --device h100 --expected-output-tokens 120
      blend plan --job-id job_01m8kzrqrsafg01r9jwt --device l4 --json
    """
    import time

    from blend_core.specs import load_device_profile
    from flows.cli.job_file import ReadOptions
    from flows.cli.plan_source import read_input
    from flows.cli.plan_workload import workload_of
    from flows.dry_run.deadline import seconds_of
    from flows.dry_run.forecast import forecast
    from flows.dry_run.plan_report import PlanReport, plan_json, plan_text
    from flows.settings import load_settings

    settings = load_settings()
    deadline_s = None if deadline is None else seconds_of(deadline)
    profile = load_device_profile(device or settings.engine.device_profile)
    note = _notes(time.monotonic)
    options = ReadOptions(model, max_tokens, is_device_here=device is None, quick=quick)
    asked = read_input(settings, source, job_id, options, note)
    workload = workload_of(
        asked,
        settings,
        profile,
        is_own_engine=device is None,
        expected_output_tokens=expected_output_tokens,
        overlap=engine is EngineKind.OVERLAP,
        quick=quick,
        on_progress=note,
    )
    report = PlanReport(
        source=asked.source,
        num_bad=asked.num_bad,
        bad_by_code=asked.bad_by_code,
        counted_with_tokenizer=asked.counted_with_tokenizer,
        expected_output_tokens=expected_output_tokens,
        workload=workload,
        forecast=forecast(workload, asked.policy.value, deadline_s, note),
    )
    if json:
        print_json(plan_json(report))
    else:
        print_line(plan_text(report))


def _notes(clock: Callable[[], float]) -> Callable[[str], None]:
    """Says on stderr what is being done, no oftener than every few seconds: a short command says nothing."""
    last = clock()

    def note(text: str) -> None:
        nonlocal last
        if clock() - last >= SECONDS_BETWEEN_NOTES:
            last = clock()
            tell(f"{text} …")

    return note
