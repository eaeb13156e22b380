"""The export stage: output and error objects of a job whose requests all have a result."""

from flows.job_parts import OutputFormat
from flows.stages.context import JobContext
from storage.exporting import export_job as export_objects


def export_job(context: JobContext) -> str:
    """Writes the objects anew, counted against the database; returns the outcome in one line.

    Raises:
        StorageError: requests are pending, the counts disagree, or the object store refused.
    """
    outputs = context.spec.outputs
    exported = export_objects(
        context.wiring.database,
        context.wiring.objects,
        context.job_id,
        as_jsonl=OutputFormat.JSONL in outputs,
        as_table=OutputFormat.PARQUET in outputs,
        run=context.run,
        counted=context.progress.counted,
    )
    if exported.gone_uris:
        context.progress.note(
            f"{len(exported.gone_uris):,} long answers were exported with their beginning alone, since their "
            f"objects are gone; the first is {exported.gone_uris[0]}."
        )
    written = []
    if exported.output_uri is not None:
        written.append(f"{exported.num_output:,} lines in {exported.output_uri}")
    if exported.error_uri is not None:
        written.append(f"{exported.num_error:,} lines in {exported.error_uri}")
    if exported.table_uri is not None:
        written.append(f"{exported.num_output + exported.num_error:,} rows in {exported.table_uri}")
    return ", ".join(written)
