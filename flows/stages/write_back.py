"""The write-back stage: results into a table of the user's, after every other output is there."""

from flows.stages.context import JobContext
from flows.write_back import write_back_results


def write_back_job(context: JobContext) -> str:
    """Upserts the results; returns the outcome in one line. A table that refuses is told, and never an error.

    Raises:
        StaleRunError: the run no longer owns the job.
        StorageError: the results cannot be read, or the outcome cannot be recorded in the platform's own
            tables.
    """
    outcome = write_back_results(
        context.wiring, context.spec, context.job_id, context.run, context.stop, context.progress.counted
    )
    asked = context.spec.write_back
    assert asked is not None
    if outcome["error"] is not None:
        context.progress.note(
            f"Written back {outcome['num_written']:,} results, then: {outcome['error']} "
            f"`blend write-back {context.job_id}` does it again."
        )
    dropped = f", {outcome['num_dropped']:,} dropped by a trigger" if outcome["num_dropped"] else ""
    return (
        f"{outcome['num_written']:,} results into {asked.table}, {outcome['num_refused']:,} refused{dropped}"
    )
