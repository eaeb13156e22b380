"""One commit of a run's results and windows, under its job's row lock."""

import logging
import time
from collections import Counter
from collections.abc import Sequence

import psycopg

from storage.copying import copy_rows, store_all
from storage.database import Database
from storage.ownership import Run, hold_job
from storage.result_rows import RESULT_COLUMNS, WINDOW_COLUMNS, GivenResult, GivenWindow, ResultValues
from storage.shards import Lease, count_ended, held_leases

_log = logging.getLogger(__name__)


def commit_rows(
    connection: psycopg.Connection, run: Run, results: Sequence[GivenResult], windows: Sequence[GivenWindow]
) -> None:
    """Stores what is new of results and windows, and counts it, in one transaction.

    The first answer to a request wins. A result whose rank does not hold the shard any more is left out: who
    took the shard runs the request. A row that the database refuses becomes an error row; a window that it
    refuses is left out.

    Raises:
        StaleRunError: the run no longer owns its job; nothing is stored.
    """
    counts = {"succeeded": 0, "errored": 0}

    def store_results(part: Sequence[ResultValues]) -> None:
        copy_rows(connection, "result", RESULT_COLUMNS, (values.row(run) for values in part))
        for values in part:
            counts[values.status] += 1

    def refuse_result(values: ResultValues, error: Exception) -> None:
        store_results([values.refused(error, time.time())])

    def store_windows(part: Sequence[GivenWindow]) -> None:
        copy_rows(connection, "batch_metric", WINDOW_COLUMNS, (given.row(run) for given in part))

    def refuse_window(given: GivenWindow, error: Exception) -> None:
        _log.warning("A window of run %s cannot be stored: %s", run.run_id, type(error).__name__)

    with connection.transaction():
        # The lock keeps takeovers and other ranks' flushes out until the commit, so what is new stays
        # new.
        hold_job(connection, run)
        new = _first_of_each(_held(connection, run, _unrecorded(connection, run, results)))
        store_all(connection, [given.values for given in new], store_results, refuse_result)
        count_ended(connection, run, Counter(given.lease for given in new if given.lease is not None))
        store_all(connection, _new_windows(connection, run, windows), store_windows, refuse_window)
        connection.execute(
            "UPDATE batch_job SET num_succeeded = num_succeeded + %(succeeded)s,"
            " num_errored = num_errored + %(errored)s WHERE job_id = %(job_id)s",
            {**counts, "job_id": run.job_id},
        )


def next_batch_indexes(db: Database, run: Run) -> dict[int, int]:
    """By rank the number of the next window, for those ranks of which the run has stored windows.

    A stage that is done again in the same run numbers its windows on from here.
    """
    with db.raw() as connection:
        return dict(
            connection.execute(
                "SELECT rank, max(batch_index) + 1 FROM batch_metric"
                " WHERE job_id = %s AND run_id = %s GROUP BY rank",
                (run.job_id, run.run_id),
            ).fetchall()
        )


def _held(connection: psycopg.Connection, run: Run, results: Sequence[GivenResult]) -> list[GivenResult]:
    """Those whose rank holds their shard, and those that are of no rank."""
    held: set[Lease | None] = {None}
    held |= held_leases(connection, run, {given.lease for given in results if given.lease is not None})
    kept = [given for given in results if given.lease in held]
    if len(kept) < len(results):
        _log.warning(
            "%d late results of run %s are refused: their shards were taken over.",
            len(results) - len(kept),
            run.run_id,
        )
    return kept


def _unrecorded(
    connection: psycopg.Connection, run: Run, results: Sequence[GivenResult]
) -> list[GivenResult]:
    """Those of requests without a result in the database.

    Asked before the leases are: an earlier try, whose commit was never confirmed, may have got their shards
    done, and then nobody holds these.
    """
    rows = connection.execute(
        "SELECT seq FROM result WHERE job_id = %s AND seq = ANY(%s)",
        (run.job_id, [given.values.seq for given in results]),
    )
    known = {seq for (seq,) in rows}
    return [given for given in results if given.values.seq not in known]


def _first_of_each(results: Sequence[GivenResult]) -> list[GivenResult]:
    """The first result of each request."""
    return list({given.values.seq: given for given in reversed(results)}.values())


def _new_windows(
    connection: psycopg.Connection, run: Run, windows: Sequence[GivenWindow]
) -> list[GivenWindow]:
    """Those that an earlier try, whose commit was never confirmed, has not stored."""
    if not windows:
        return []
    first = {(given.rank, given.window.batch_index): given for given in reversed(windows)}
    # Ranks by name: a server before Postgres 18 would look at every window of the run without them.
    known = connection.execute(
        "SELECT rank, batch_index FROM batch_metric"
        " WHERE job_id = %s AND run_id = %s AND rank = ANY(%s) AND batch_index >= %s",
        (run.job_id, run.run_id, sorted({rank for rank, _ in first}), min(index for _, index in first)),
    )
    for key in known.fetchall():
        first.pop(key, None)
    return list(first.values())
