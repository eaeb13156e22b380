"""Results of a job written back into a table of the user's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from blend_core.errors import BlendError, ConfigurationError
from flows.job_spec import BatchJobSpec
from flows.stopping import StopReason, StopSignal
from flows.wiring import Wiring
from storage.job_outputs import set_job_write_back
from storage.jobs import get_job
from storage.ownership import Run, hold_job
from storage.results import ResultRow, iter_results
from storage.target_table import WriteBackTarget
from storage.write_back import WriteBackCounts, check_target, write_results


def write_back_target(wiring: Wiring, spec: BatchJobSpec) -> WriteBackTarget | None:
    """Where a job's results go, None where it does not ask. Connects to nothing.

    Raises:
        ConfigurationError: the connection has no URL.
    """
    asked = spec.write_back
    if asked is None:
        return None
    url = wiring.target_urls().get(asked.connection)
    if url is None:
        raise ConfigurationError(
            f"There is no connection {asked.connection!r} to write back to; set "
            f"BLEND_TARGETS__{asked.connection.upper()} to its URL where the job runs (a submitted job: in "
            "the environment of `blend up`, then run that again)."
        )
    columns = {field.value: column for field, column in asked.columns.items()}
    return WriteBackTarget(url, asked.table, asked.key_column, columns)


def check_write_back(wiring: Wiring, spec: BatchJobSpec) -> None:
    """Checks table, columns and rights before anything runs.

    Raises:
        ConfigurationError: something is missing; names it.
        StorageUnavailableError: the user's server did not answer.
    """
    target = write_back_target(wiring, spec)
    if target is not None:
        check_target(target)


def write_back_results(
    wiring: Wiring,
    spec: BatchJobSpec,
    job_id: str,
    run: Run | None = None,
    stop: StopSignal | None = None,
    counted: Callable[[int, int], None] = lambda num_done, num_total: None,
) -> dict[str, Any]:
    """Upserts a job's results, and records and returns what came of it.

    A table that cannot be written never fails the job: `error` says why, and `blend write-back` does it
    again. Where the platform's own database or object store is away, that is raised, and all of it is to be
    done again. `run` is the run that writes, None for a job that has ended.

    A table that is locked is waited for, up to a minute; where `stop` tells the run to end, for some seconds.
    `counted` is told before each batch how many results have been tried, and of how many requests.

    Raises:
        StaleRunError: the run no longer owns the job; asked before each batch, so that at most one batch goes
            into the table after that.
        StorageError: the results cannot be read, or the outcome cannot be recorded.
    """
    job = get_job(wiring.database, job_id)
    own_errors: list[BlendError] = []

    @contextmanager
    def own() -> Iterator[None]:
        try:
            yield
        except BlendError as error:
            own_errors.append(error)
            raise

    def results() -> Iterator[ResultRow]:
        with own():
            yield from iter_results(wiring.database, job_id, objects=wiring.objects)

    def check_owner() -> None:
        counted(counts.num_written + counts.num_refused + counts.num_dropped, job.num_total)
        if run is not None:
            with own(), wiring.database.connect() as connection:
                hold_job(connection, run)

    def may_wait() -> bool:
        # What a completion window has cut off is in no hurry.
        return stop is None or stop.reason in (None, StopReason.EXPIRED)

    counts = WriteBackCounts()
    try:
        target = write_back_target(wiring, spec)
        assert target is not None, "the job asks for it"
        write_results(
            target, job_id, job.model, results(), counts, before_batch=check_owner, may_wait=may_wait
        )
        error = counts.refusal(target.table)
    except BlendError as caught:
        if caught in own_errors:
            raise
        error = str(caught)
    outcome = {
        "num_written": counts.num_written,
        "num_refused": counts.num_refused,
        "num_dropped": counts.num_dropped,
        "num_without_key": counts.num_without_key,
        "error": error,
    }
    set_job_write_back(wiring.database, job_id, outcome, run)
    return outcome
