"""The export stage: output and error objects of a job whose requests all have a result."""

from flows.stages.context import JobContext
from storage.exporting import export_job as export_objects


def export_job(context: JobContext) -> str:
    """Writes the objects anew, counted against the database; returns the outcome in one line.

    Raises:
        StorageError: requests are pending, the counts disagree, or the object store refused.
    """
    exported = export_objects(
        context.wiring.database, context.wiring.objects, context.job_id, run=context.run
    )
    errors = "" if exported.error_uri is None else f", {exported.num_error:,} lines in {exported.error_uri}"
    return f"{exported.num_output:,} lines in {exported.output_uri}{errors}"
