"""The report stage: the counts of an ended job reconciled, and what it did in one value."""

from blend_core.errors import StorageError
from flows.report import build_report
from flows.stages.context import JobContext


def report_job(context: JobContext) -> str:
    """Holds the counts of a job in an end state together; returns the outcome in one line.

    Raises:
        StorageError: succeeded, errored, expired and cancelled requests do not add up to the total.
    """
    report = build_report(context.wiring.database, context.job_id)
    standing = report.counts
    num_ended = standing.succeeded + standing.errored + standing.expired + standing.cancelled
    if num_ended != standing.total:
        raise StorageError(
            f"Job {context.job_id} counts {num_ended} ended requests of {standing.total}; "
            "compare its rows in `request` and `result`, and report this.",
            job_id=context.job_id,
        )
    sharing = report.metrics.prefix_sharing
    measured = "" if sharing is None else f", prefix sharing {sharing:.0%}"
    return (
        f"{standing.succeeded:,} succeeded + {standing.errored:,} errored + {standing.expired:,} expired "
        f"+ {standing.cancelled:,} cancelled = {standing.total:,}{measured}"
    )
