"""The ingest stage: the sources of a job become request shards and rows, bad lines error rows."""

from functools import partial

from blend_core.tokenizing import Tokenizer
from flows.ingest.checkpoints import Checkpoints, kept_part
from flows.ingest.ingest import IngestCounts, ingest
from flows.ingest.only_new import OnlyNew
from flows.ingest.sources import read_sources
from flows.job_parts import DuplicateRule
from flows.stages.context import JobContext
from storage.job_sources import iter_used_ids, load_job_sources, save_job_sources
from storage.jobs import get_job
from storage.readings import Readings
from storage.request_shard_writer import RequestShardWriter
from storage.request_shards import request_index_key
from storage.requests import RequestWriter


class _StopIngest(Exception):  # noqa: N818 - no error: the way out of a loop that is not ours
    """The run is to stop; the ingest stays unfinished."""


def ingest_job(context: JobContext) -> str:
    """Reads every source to its end; returns the outcome in one line.

    An ingest that ends early, by an error or because the context is told to stop, is continued by the next
    run: it reads the same versions of the same objects, and those not again that were stored completely.

    Raises:
        ConfigurationError: the model, a template or a connection is wrong.
        SourceError: a source cannot be read as given.
        StorageError: requests cannot be written.
    """
    wiring, spec = context.wiring, context.spec
    serving = wiring.serving(spec)
    counts = IngestCounts()

    def on_progress(so_far: IngestCounts) -> None:
        nonlocal counts
        counts = so_far
        context.progress.counted(so_far.total, None)
        if context.stop.reason is not None:
            raise _StopIngest

    options = wiring.parse_options(spec)
    database, job_id = wiring.database, context.job_id
    only_new = on_complete = None
    if spec.reads_only_new:
        # Readings are kept under the name as it was submitted, without a day in it.
        submitted_name = str(get_job(database, job_id).spec["name"])
        only_new = OnlyNew(spec, Readings(database, submitted_name))
        on_complete = partial(only_new.record, job_id=job_id)
    # Which objects are new is asked anew: another job may have read some of an earlier list meanwhile.
    listed = [] if spec.s3_only_new else load_job_sources(database, job_id)
    sources = read_sources(spec, wiring.objects, wiring.source_urls(), options, listed, only_new)
    if not listed:
        save_job_sources(database, job_id, context.run, sources.listed)
    kept = kept_part(sources.listed)
    rows = RequestWriter(database, job_id, context.run, num_kept=kept.num_items, on_complete=on_complete)
    shards = RequestShardWriter(
        wiring.objects,
        context.run,
        num_kept=kept.num_items,
        kept_index_key=request_index_key(database, job_id),
    )
    sources.start_at(kept.num_sources, Checkpoints(rows, shards).source_read)
    try:
        ingest(
            sources,
            Tokenizer(wiring.models.resolve(spec.model)),
            rows,
            shards,
            max_model_len=serving.max_model_len(wiring.model_spec(spec)),
            fail_job_on_duplicate=spec.options.on_duplicate is DuplicateRule.JOB,
            on_progress=on_progress,
            used_ids=iter_used_ids(database, job_id, kept.num_items),
        )
    except _StopIngest:
        return f"stopped after {counts.total:,} lines and rows"
    return (
        f"{counts.total:,} lines and rows, {counts.errored:,} bad, {counts.num_prompt_tokens:,} prompt tokens"
    )
