"""Results and windows of a run, written by a thread of its own."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import psycopg

from blend_core.engines.base import RequestFailed, RequestFinished, StepWindow
from blend_core.errors import BlendError, StorageError, StorageUnavailableError
from storage.database import Database, storage_error
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.result_rows import GivenResult, GivenWindow, ResultValues, failed_values, finished_values
from storage.run_rows import commit_rows
from storage.shards import Lease

_log = logging.getLogger(__name__)
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
_QUICK_END_S = 2.0

_GivenEvent = tuple[RequestFinished | RequestFailed, Lease | None]


class Recorder:
    """Commits results and windows, at the latest a second after they were given.

    Any thread may call it: the ranks of a run share one. Calls return at once while fewer than
    `max_waiting_rows` and `max_waiting_tokens` wait and block beyond that, so a database that is slow or away
    slows the engine down and never fills the memory. The first answer to a request wins; giving one again
    changes nothing. A row that the database refuses becomes an error row and takes no other with it. While
    the database is away the thread tries again, for `give_up_after_s` at most, and not at all once the
    process is being ended (KeyboardInterrupt): what is not recorded runs again. When it has to give up, or
    another run took over the job, the next call and `close` raise why.
    """

    def __init__(
        self,
        db: Database,
        objects: ObjectStore,
        run: Run,
        *,
        flush_interval_s: float = 0.5,
        max_batch_rows: int = 10_000,
        max_waiting_rows: int = 40_000,
        max_waiting_tokens: int = 10_000_000,
        give_up_after_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the thread; `clock` measures how long the database has been away."""
        self._db = db
        self._objects = objects
        self._run = run
        self._flush_interval_s = flush_interval_s
        self._max_batch_rows = max_batch_rows
        self._max_waiting_rows = max_waiting_rows
        self._max_waiting_tokens = max_waiting_tokens
        self._give_up_after_s = give_up_after_s
        self._clock = clock
        self._connection: psycopg.Connection | None = None
        self._is_abandoned = threading.Event()
        self._changed = threading.Condition()
        # All of these are guarded by `_changed`.
        self._results: list[_GivenEvent] = []
        self._windows: list[GivenWindow] = []
        self._num_in_flight = 0
        self._num_tokens = 0
        self._is_flush_wanted = False
        self._is_closing = False
        self._error: BlendError | None = None
        self._thread = threading.Thread(target=self._work, name=f"recorder-{run.run_id}", daemon=True)
        self._thread.start()

    def finished(self, event: RequestFinished, lease: Lease | None = None) -> None:
        """Gives an answer, of a shard that a rank holds. Raises what went wrong in the thread."""
        self._give(True, (event, lease), num_tokens=event.num_output_tokens)

    def failed(self, event: RequestFailed, lease: Lease | None = None) -> None:
        """Gives a request that has no answer; as `finished`."""
        self._give(True, (event, lease))

    def window(self, window: StepWindow, *, rank: int, planned_density: float | None) -> None:
        """Gives a window with the plan's density at the same share of work. Raises what went wrong in the
        thread."""
        self._give(False, GivenWindow(window, rank, planned_density))

    def flush(self) -> None:
        """Returns when everything given so far is committed. Raises what went wrong in the thread."""
        with self._changed:
            self._is_flush_wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or not self._num_waiting)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Commits everything, ends the thread, and raises what went wrong. A second call does nothing."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._changed.notify_all()
        try:
            self._thread.join()
        except BaseException:
            self._is_abandoned.set()
            raise
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if not isinstance(error, Exception):
            self._abandon()
            return
        try:
            self.close()
        except BlendError as second:
            # The first error says more; it must not be replaced by what followed from it.
            _log.warning("The recorder ended with: %s", second)

    def _abandon(self) -> None:
        """Commits what the database takes within moments."""
        self._is_abandoned.set()
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(_QUICK_END_S)

    @property
    def _num_waiting(self) -> int:
        return len(self._results) + len(self._windows) + self._num_in_flight

    @property
    def _is_full(self) -> bool:
        return self._num_waiting >= self._max_waiting_rows or self._num_tokens >= self._max_waiting_tokens

    def _give(self, is_result: bool, item: Any, num_tokens: int = 0) -> None:
        with self._changed:
            if self._is_full:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._error is not None or not self._is_full)
            if self._error is not None:
                raise self._error
            if self._is_closing:
                raise StorageError("The recorder is closed; open another one.", run_id=self._run.run_id)
            # Looked up here: the thread exchanges the lists for empty ones.
            waiting: list[Any] = self._results if is_result else self._windows
            waiting.append(item)
            self._num_tokens += num_tokens
            if len(waiting) == self._max_batch_rows:
                self._changed.notify_all()

    def _work(self) -> None:
        try:
            while self._write_next():
                pass
        except BlendError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("The recorder failed")
            self._fail(StorageError(f"Results could not be recorded ({type(error).__name__}); see the log."))
        finally:
            self._disconnect()

    def _write_next(self) -> bool:
        """Waits for a reason to write, writes what is there, and says whether to go on."""
        with self._changed:
            self._changed.wait_for(self._is_due, timeout=self._flush_interval_s)
            results, self._results = self._results, []
            windows, self._windows = self._windows, []
            self._num_in_flight = len(results) + len(windows)
            num_tokens = self._num_tokens
            is_last = self._is_closing
        if results or windows:
            self._write(results, windows)
        with self._changed:
            self._num_in_flight = 0
            self._num_tokens -= num_tokens
            self._is_flush_wanted = bool(self._num_waiting) and self._is_flush_wanted
            self._changed.notify_all()
        return not is_last

    def _is_due(self) -> bool:
        return (
            self._is_closing
            or self._is_flush_wanted
            or max(len(self._results), len(self._windows)) >= self._max_batch_rows
            or self._is_full
        )

    def _fail(self, error: BlendError) -> None:
        with self._changed:
            self._error = error
            self._results, self._windows, self._num_in_flight = [], [], 0
            self._changed.notify_all()

    def _write(self, results: Sequence[_GivenEvent], windows: Sequence[GivenWindow]) -> None:
        """Commits, trying again while the database or the object store does not answer."""
        away_since: float | None = None
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                given = [GivenResult(self._values(event), lease) for event, lease in results]
                commit_rows(self._connect(), self._run, given, windows)
                return
            except (StorageUnavailableError, psycopg.OperationalError, psycopg.InterfaceError) as error:
                self._disconnect()
                now = self._clock()
                away_since = now if away_since is None else away_since
                if self._is_abandoned.is_set() or now - away_since >= self._give_up_after_s:
                    raise StorageUnavailableError(
                        f"Results could not be recorded for {now - away_since:.0f} s. {self._why(error)} "
                        f"Then run job {self._run.job_id} again: what it lacks runs again.",
                        job_id=self._run.job_id,
                    ) from error
                _log.warning("Results wait to be recorded: %s", self._why(error))
                self._is_abandoned.wait(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    def _why(self, error: Exception) -> str:
        """What did not answer and what to do about it: the object store, too, takes a part of the answers."""
        if isinstance(error, psycopg.Error):
            error = storage_error(error, self._db.safe_url)
        return str(error)

    def _values(self, event: RequestFinished | RequestFailed) -> ResultValues:
        if isinstance(event, RequestFailed):
            return failed_values(event)
        return finished_values(event, self._objects, self._run)

    def _connect(self) -> psycopg.Connection:
        if self._connection is None:
            connection = self._db.open_raw()
            connection.autocommit = True
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
