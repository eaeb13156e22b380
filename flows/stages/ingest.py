"""The ingest stage: the sources of a job become request shards and rows, bad lines error rows."""

from blend_core.tokenizing import Tokenizer
from flows.ingest.ingest import IngestCounts, ingest
from flows.ingest.parse import ParseOptions
from flows.ingest.sources import read_sources
from flows.job_spec import DuplicateRule
from flows.stages.context import JobContext
from storage.jobs import set_job_manifest
from storage.request_shards import RequestShardWriter
from storage.requests import RequestWriter


class _StopIngest(Exception):  # noqa: N818 - no error: the way out of a loop that is not ours
    """The run is to stop; the ingest stays unfinished."""


def ingest_job(context: JobContext) -> str:
    """Reads every source to its end; returns the outcome in one line.

    An ingest that ends early, by an error or because the context is told to stop, is done anew by the next
    run.

    Raises:
        ConfigurationError: the model, a template or a connection is wrong.
        SourceError: a source cannot be read as given.
        StorageError: requests cannot be written.
    """
    wiring, spec = context.wiring, context.spec
    counts = IngestCounts()

    def on_progress(so_far: IngestCounts) -> None:
        nonlocal counts
        counts = so_far
        context.progress.counted(so_far.total, None)
        if context.stop.reason is not None:
            raise _StopIngest

    options = ParseOptions(
        model=spec.model,
        strict_model=spec.options.strict_model,
        default_max_tokens=spec.options.default_max_tokens,
    )
    sources = read_sources(spec, wiring.objects, wiring.source_urls(), options)
    try:
        ingest(
            sources,
            Tokenizer(wiring.models.resolve(spec.model)),
            RequestWriter(wiring.database, context.job_id, context.run),
            RequestShardWriter(wiring.objects, context.job_id),
            max_model_len=wiring.model_spec(spec.model).max_model_len,
            fail_job_on_duplicate=spec.options.on_duplicate is DuplicateRule.JOB,
            on_progress=on_progress,
        )
    except _StopIngest:
        return f"stopped after {counts.total:,} lines and rows"
    set_job_manifest(wiring.database, context.job_id, sources.manifest(), run=context.run)
    return (
        f"{counts.total:,} lines and rows, {counts.errored:,} bad, {counts.num_prompt_tokens:,} prompt tokens"
    )
