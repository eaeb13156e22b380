"""`blend validate` and `blend plan`: look at requests before anything runs."""

from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from blend_core.errors import ConfigurationError
from blend_core.wording import count_text
from flows.cli.output import Json, print_json, print_line, tell
from flows.numbers import MAX_TOKENS

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="OpenAI Batch JSONL (plain, gzip or zstd) or Parquet: a local file or s3://bucket/key.",
    ),
]
SECONDS_BETWEEN_NOTES = 3.0


class EngineKind(StrEnum):
    """What a simulated engine does at one time."""

    SEQUENTIAL = "sequential"
    OVERLAP = "overlap"


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(validate)
    app.command()(plan)


def validate(
    source: Source,
    model: Annotated[
        str | None,
        typer.Option(
            help="Check as a job of this model with `strict_model` does: other models are refused, and "
            "prompts are tokenised and their lengths checked if it is a model of the store or a folder."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check a request file line by line.

    Prints each bad line (or row, of Parquet) with its number, code and reason. Needs neither services nor a
    model. Blank lines do not count. How many tokens a prompt has, only the model's tokenizer knows:
    prompts too long for it are found with --model where its files are here, else when the job runs.
    Exits with 0 whatever it finds: a job goes on beside bad lines. A gate asks --json for "invalid".

    \b
    Examples:
      blend validate requests.jsonl
      blend validate requests.jsonl.gz --json
      blend validate requests.parquet --model smollm2-135m
    """
    from flows.cli.source_items import source_items
    from flows.dry_run.lines import checked_items, tokenised_items
    from flows.dry_run.model import find_tokenizer
    from flows.ingest.parse import ParseOptions
    from flows.settings import load_settings

    options = ParseOptions(model or "", strict_model=model is not None)
    found = None if model is None else find_tokenizer(load_settings(), model)
    lines = checked_items(source_items(source, options))
    if found is not None:
        lines = tokenised_items(lines, found.tokenizer, found.max_model_len)
    errors: list[dict[str, Any]] = []
    total = 0
    for line in lines:
        total += 1
        if line.code is not None:
            errors.append(
                {
                    "line": line.number,
                    "custom_id": line.custom_id,
                    "code": line.code.value,
                    "reason": line.reason,
                }
            )

    codes = Counter(error["code"] for error in errors)
    if json:
        print_json(
            {
                "source": source,
                "total": total,
                "valid": total - len(errors),
                "invalid": len(errors),
                "lengths_checked": found is not None,
                "error_codes": dict(codes.most_common()),
                "errors": errors,
            }
        )
        return
    for error in errors:
        name = f" ({error['custom_id']})" if error["custom_id"] is not None else ""
        print_line(f"line {error['line']}{name}: {error['code']}: {error['reason']}")
    print_line(
        f"{count_text(total, 'request')}: {total - len(errors):,} valid, {len(errors):,} invalid"
        f"{'' if found is not None else _lengths_untold(model)}"
    )


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
            "--quick", help="Count four bytes as a token, and simulate 4,000 requests where there are more."
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
    if (source is None) == (job_id is None):
        raise ConfigurationError("Name one thing to plan: a SOURCE, or a job with --job-id.")

    import time

    import numpy as np

    from blend_core.specs import load_device_profile
    from flows.cli.plan_source import PlanOptions, read_job, read_source
    from flows.dry_run.deadline import seconds_of
    from flows.dry_run.forecast import forecast
    from flows.dry_run.lengths import (
        lengths_by_bounds,
        lengths_by_earlier_nights,
        lengths_by_mean,
        lengths_by_record,
    )
    from flows.dry_run.plan_report import PlanReport, plan_json, plan_text
    from flows.dry_run.target import own_target, target_of
    from flows.dry_run.workload import QUICK, SimulationSize, Workload, prefix_tree_of, requests_that_fit
    from flows.job_parts import JobOptions
    from flows.serving import Serving
    from flows.settings import load_settings

    settings = load_settings()
    deadline_s = None if deadline is None else seconds_of(deadline)
    profile = load_device_profile(device or settings.engine.device_profile)
    note = _notes(time.monotonic)
    options = PlanOptions(model, max_tokens, quick=quick)
    asked = (
        read_job(settings, job_id, options)
        if job_id is not None
        else read_source(settings, source or "", options, note)
    )
    target = (
        own_target(asked.model, profile, Serving.of(settings.engine, JobOptions()))
        if device is None
        else target_of(asked.model, profile, settings.engine.block_size)
    )
    requests = requests_that_fit(asked.requests, target)
    note(f"building the prefix tree of {len(requests):,} prompts")
    tree = prefix_tree_of(requests, target)
    priors = asked.priors.take(np.searchsorted(asked.requests.seq, requests.seq))
    rng = np.random.default_rng(0)
    if expected_output_tokens is not None:
        lengths = lengths_by_mean(requests, expected_output_tokens, rng)
    elif asked.recorded:
        lengths = lengths_by_record(requests, tree, asked.recorded, rng)
    elif (priors.telling() >= 0).any():
        lengths = lengths_by_earlier_nights(requests, tree, priors, rng)
    else:
        lengths = lengths_by_bounds(requests, tree, rng)
    workload = Workload(
        requests,
        tree,
        lengths,
        target,
        overlap=engine is EngineKind.OVERLAP,
        size=QUICK if quick else SimulationSize(),
        num_too_large=len(asked.requests) - len(requests),
    )
    told = forecast(workload, asked.policy.value, deadline_s, note)
    report = PlanReport(
        source=source or f"job {job_id}",
        num_bad=asked.num_bad,
        bad_by_code=asked.bad_by_code,
        counted_with_tokenizer=asked.counted_with_tokenizer,
        expected_output_tokens=expected_output_tokens,
        workload=workload,
        forecast=told,
    )
    if json:
        print_json(plan_json(report))
    else:
        print_line(plan_text(report))


def _lengths_untold(model: str | None) -> str:
    """Why the lengths of prompts were not checked, behind a count."""
    if model is None:
        return "; lengths of prompts are not checked without --model"
    return f"; lengths of prompts are not checked, {model} is not here with its tokenizer"


def _notes(clock: Callable[[], float]) -> Callable[[str], None]:
    """Says on stderr what is being done, no oftener than every few seconds: a short command says nothing."""
    last = clock()

    def note(text: str) -> None:
        nonlocal last
        if clock() - last >= SECONDS_BETWEEN_NOTES:
            last = clock()
            tell(f"{text} …")

    return note
