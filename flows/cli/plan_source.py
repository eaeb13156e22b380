"""What `blend plan` is asked to plan: a request file, a job file, or a job."""

from collections.abc import Callable
from dataclasses import dataclass

from blend_core.errors import ConfigurationError
from blend_core.length_priors import LengthPriors, no_priors
from blend_core.request import RequestArrays
from blend_core.specs import ModelSpec
from flows.cli.job_file import ReadOptions, opened_job_file, served_model
from flows.cli.output import tell
from flows.cli.services import connected
from flows.cli.source_items import source_items
from flows.dry_run.lines import checked_items
from flows.dry_run.model import load_tokenizer
from flows.dry_run.requests import cut_to, read_requests, rows_within
from flows.ingest.parse import ParseOptions
from flows.job_parts import JobOptions, Policy
from flows.job_spec import JOB_FILE_SUFFIXES
from flows.serving import Serving
from flows.settings import Settings

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class PlanInput:
    """Requests to plan.

    Attributes:
        source: where they are from, as a report names it.
        requests: those that can be planned.
        num_bad: lines and rows that would become error rows.
        bad_by_code: the same by error code; empty for a job, whose results name them.
        counted_with_tokenizer: whether tokens are the model's own.
        model: sizes of the model, with the context that it would be served with.
        serving: the engine that is planned for.
        policy: the job's; a file of requests gets the default.
        recorded: output tokens by `seq` of answers that the job has.
        priors: what earlier nights tell, row by row of the requests.
    """

    source: str
    requests: RequestArrays
    num_bad: int
    bad_by_code: dict[str, int]
    counted_with_tokenizer: bool
    model: ModelSpec
    serving: Serving
    policy: Policy
    recorded: dict[int, int]
    priors: LengthPriors


def read_input(
    settings: Settings,
    source: str | None,
    job_id: str | None,
    options: ReadOptions,
    on_progress: Callable[[str], None],
) -> PlanInput:
    """Reads what is named: a source, or a job.

    Raises:
        ConfigurationError: none of them is named or both are; or a file or the model is not there, or wrong.
        SourceError: a source cannot be read as given.
        StorageError: there is no such job, or its sources have not been read to their end.
        ServiceError: what is named needs services that do not run.
    """

    def on_lines(num_lines: int) -> None:
        on_progress(f"{num_lines:,} lines read")

    if source is None and job_id is not None:
        return _read_job(settings, job_id, options)
    if source is not None and job_id is None:
        read = _read_job_file if source.endswith(JOB_FILE_SUFFIXES) else _read_request_file
        return read(settings, source, options, on_lines)
    raise ConfigurationError("Name one thing to plan: a SOURCE, or a job with --job-id.")


def _read_request_file(
    settings: Settings, source: str, options: ReadOptions, on_lines: Callable[[int], None]
) -> PlanInput:
    """Reads a request file, local or in S3."""
    name, defaults = options.model or DEFAULT_MODEL, JobOptions()
    serving = Serving.to_plan(settings.engine, defaults, is_device_here=options.is_device_here)
    model = served_model(settings, serving, name, options)
    tokenizer = None if options.quick else load_tokenizer(settings, name, tell)
    max_tokens = options.default_max_tokens or defaults.default_max_tokens
    lines = checked_items(source_items(source, ParseOptions(name, default_max_tokens=max_tokens)))
    found = read_requests(lines, tokenizer, model.max_model_len, on_lines)
    return PlanInput(
        source=source,
        requests=found.arrays,
        num_bad=found.num_bad,
        bad_by_code=found.bad_lines,
        counted_with_tokenizer=tokenizer is not None,
        model=model,
        serving=serving,
        policy=defaults.policy,
        recorded={},
        priors=no_priors(len(found.arrays)),
    )


def _read_job_file(
    settings: Settings, source: str, options: ReadOptions, on_lines: Callable[[int], None]
) -> PlanInput:
    """Reads the sources of a job file, and what earlier nights tell of its prompt templates."""
    from flows.dry_run.job_source import priors_of_templates

    with opened_job_file(settings, source, options, tell) as job:
        found = read_requests(job.lines, job.tokenizer, job.model.max_model_len, on_lines)
        name = options.model or job.spec.model
        priors = priors_of_templates(job.wiring.database, name, found.templates, tell)
    return PlanInput(
        source=source,
        requests=found.arrays,
        num_bad=found.num_bad,
        bad_by_code=found.bad_lines,
        counted_with_tokenizer=job.tokenizer is not None,
        model=job.model,
        serving=job.serving,
        policy=job.spec.options.policy,
        recorded={},
        priors=priors,
    )


def _read_job(settings: Settings, job_id: str, options: ReadOptions) -> PlanInput:
    """Reads the requests of a job, as they were tokenised for it, and the lengths of its answers."""
    from flows.dry_run.job_source import known_job

    with connected(settings) as wiring:
        job = known_job(wiring, job_id, options.model)
    name = options.model or job.spec.model
    serving = Serving.to_plan(settings.engine, job.spec.options, is_device_here=options.is_device_here)
    model = served_model(settings, serving, name, options)
    # Of the job's own model all are; another may be shorter.
    rows = rows_within(job.arrays, model.max_model_len)
    return PlanInput(
        source=f"job {job_id}",
        requests=cut_to(job.arrays.take(rows), model.max_model_len),
        num_bad=job.num_bad + len(job.arrays) - len(rows),
        bad_by_code={},
        counted_with_tokenizer=True,
        model=model,
        serving=serving,
        policy=job.spec.options.policy,
        recorded=job.recorded,
        priors=job.priors.take(rows),
    )
