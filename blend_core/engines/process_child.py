"""The engine's side of `EngineProcess`, which starts it as

    python -m blend_core.engines.process_child CHANNEL_FD LIFELINE_FD FOLDER

Standard output is the parent's standard error here, so whatever an engine prints ends up among the logs.
"""

import os
import pickle
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from blend_core.engines.base import (
    Engine,
    EngineEvent,
    RequestFailed,
    RequestFinished,
    RequestsAdmitted,
    RequestsReleased,
)
from blend_core.engines.process_group import end_group
from blend_core.engines.process_messages import (
    Ask,
    AskChanges,
    AskPlan,
    AskRequests,
    Changes,
    Failed,
    Happened,
    Opened,
    RunEnded,
    SourceFailed,
    StartRun,
)
from blend_core.errors import (
    BlendError,
    ConfigurationError,
    EngineDiedError,
    EngineError,
    EngineStartError,
)
from blend_core.plan import Plan
from blend_core.request import Request

_CHANGES_INTERVAL_S = 0.1
_PARENT_POLL_S = 0.5
_REMOVAL_S = 2.0


def main(channel_fd: int, lifeline_fd: int, folder: str) -> None:
    """Opens the engine that the parent names and runs what it asks for, until the parent is gone.

    Args:
        channel_fd: of a socket to the parent.
        lifeline_fd: see `end_with_parent`.
        folder: for temporary files; it is removed where the parent cannot.
    """
    end_with_parent(lifeline_fd, folder)
    channel = _Channel(Connection(channel_fd))
    try:
        engine = _open(channel)
        while engine is not None:
            assert isinstance(channel.receive(), StartRun), "the parent sent an answer outside a run"
            _run(engine, channel)
    except _ParentGoneError:
        # Leaving in good order would leave the engine's own processes behind.
        _end(folder)


class _ParentGoneError(BaseException):
    """The channel broke. Not an `Exception`: no engine may take it for one of its own."""


class _Channel:
    """Whole messages to and from the parent."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise _ParentGoneError from None

    def receive(self) -> object:
        return pickle.loads(self.receive_bytes())  # noqa: S301 - from the parent

    def receive_bytes(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            raise _ParentGoneError from None

    def has_message(self) -> bool:
        try:
            return self._connection.poll()
        except OSError:
            raise _ParentGoneError from None


def end_with_parent(lifeline_fd: int, folder: str | None = None) -> None:
    """From now on a thread waits for the parent's end, then kills this process group, which must not be the
    parent's.

    Args:
        lifeline_fd: of a pipe whose other end the parent holds.
        folder: removed before.
    """
    threading.Thread(
        target=_wait_for_parents_end, args=(lifeline_fd, os.getppid(), folder), name="lifeline", daemon=True
    ).start()


def _wait_for_parents_end(lifeline_fd: int, parent_pid: int, folder: str | None) -> None:
    """Waits for the parent's end, then kills this process group.

    The pipe tells at once; the poll covers a pipe that some other child of the parent's inherited. The
    kernel's parent-death signal is no substitute: it is tied to the thread that started the process, and it
    would end this process before it can end its own children.
    """
    while os.getppid() == parent_pid:
        readable, _, _ = select.select([lifeline_fd], [], [], _PARENT_POLL_S)
        if readable:
            break
    _end(folder)


def _end(folder: str | None) -> None:
    """Ends this process group, this process last, and removes the folder, unless its file system hangs."""
    # Whoever waits for the device waits until this process is gone.
    end_group(os.getpgrp())
    if folder is not None:
        removal = threading.Thread(target=shutil.rmtree, args=(folder, True), daemon=True)
        removal.start()
        removal.join(_REMOVAL_S)
    # With whatever could not be looked for.
    os.killpg(0, signal.SIGKILL)


def _open(channel: _Channel) -> Engine | None:
    try:
        engine = _load_factory(channel.receive_bytes())()
        info = engine.open()
    except Exception as error:
        _report(channel, error, EngineStartError)
        return None
    channel.send(Opened(info))
    return engine


def _load_factory(pickled: bytes) -> Callable[[], Engine]:
    try:
        make_engine: Callable[[], Engine] = pickle.loads(pickled)  # noqa: S301 - from the parent
    except (AttributeError, ImportError) as error:
        raise ConfigurationError(
            f"The engine process cannot import the engine factory ({error}); define it, and what it is "
            "given, in an importable module instead of the program that is run."
        ) from None
    return make_engine


def _run(engine: Engine, channel: _Channel) -> None:
    source = RemoteSource(channel, time.monotonic)
    try:
        for event in engine.run(source):
            source.note(event)
            channel.send(Happened(event))
        source.close()
    except Exception as error:
        _report(channel, error, EngineDiedError)
        # The parent ends this process now; an answer to the last question may come before.
        while True:
            channel.receive_bytes()
    channel.send(RunEnded())


def _report(channel: _Channel, error: Exception, wrapper: type[EngineError]) -> None:
    """Sends an error of the tree as it is, any other one as its name with the details in the log.

    In mid-run any other one is the engine's end: what it had in hand then is not to be trusted any more.
    """
    if not isinstance(error, BlendError):
        traceback.print_exception(error, file=sys.stderr)
        error = wrapper(
            f"The engine failed with {type(error).__name__}; the log on standard error has the details."
        )
    channel.send(Failed(error))


class RemoteSource:
    """The parent's source, as the engine sees it.

    Changes are asked for at intervals and never waited for between steps. What the parent asks back is
    withdrawn from the engine unless it is in flight, and the parent is told which is which. That is decided
    when the engine asks what is withdrawn: it has told every start by then.
    """

    __slots__ = (
        "_asked_changes_at",
        "_channel",
        "_clock",
        "_in_flight",
        "_pending",
        "_recalled",
        "_revisions",
        "_withdrawn",
    )

    def __init__(self, channel: _Channel, clock: Callable[[], float]) -> None:
        """Asks nothing yet.

        Args:
            channel: to the parent, used by this source alone while the run lasts.
            clock: seconds of a clock that never jumps.
        """
        self._channel = channel
        self._clock = clock
        self._asked_changes_at = clock() - _CHANGES_INTERVAL_S
        self._pending = False
        self._revisions: deque[Plan] = deque()
        self._withdrawn: list[int] = []
        self._recalled: list[int] = []
        self._in_flight: set[int] = set()

    def note(self, event: EngineEvent) -> None:
        """Takes an event of the engine, before the parent is told of it."""
        match event:
            case RequestsAdmitted():
                self._in_flight.update(event.seqs)
            case RequestFinished() | RequestFailed():
                self._in_flight.discard(event.seq)

    def plan(self) -> Plan:
        """See `RequestSource`."""
        plan = self._ask(AskPlan())
        assert isinstance(plan, Plan)
        return plan

    def fetch(self, seqs: Sequence[int]) -> Sequence[Request]:
        """See `RequestSource`."""
        requests = self._ask(AskRequests(tuple(seqs)))
        assert isinstance(requests, tuple)
        return requests

    def revision(self) -> Plan | None:
        """See `RequestSource`."""
        self._look_for_changes()
        return self._revisions.popleft() if self._revisions else None

    def withdrawn(self) -> Sequence[int]:
        """See `RequestSource`."""
        self._look_for_changes()
        withdrawn, self._withdrawn = self._withdrawn, []
        self._in_flight.difference_update(withdrawn)
        return withdrawn + self._release()

    def close(self) -> None:
        """Takes the answer that may still be under way, so that the channel is empty for the next run."""
        if self._pending:
            self._take_changes()

    def _release(self) -> list[int]:
        """Answers what was asked back; returns what the engine is to drop for it."""
        if not self._recalled:
            return []
        recalled, self._recalled = self._recalled, []
        released = [seq for seq in recalled if seq not in self._in_flight]
        kept = [seq for seq in recalled if seq in self._in_flight]
        self._channel.send(Happened(RequestsReleased(tuple(released), tuple(kept))))
        return released

    def _look_for_changes(self) -> None:
        if self._pending:
            if self._channel.has_message():
                self._take_changes()
        elif self._clock() - self._asked_changes_at >= _CHANGES_INTERVAL_S:
            self._channel.send(AskChanges())
            self._asked_changes_at = self._clock()
            self._pending = True

    def _take_changes(self) -> None:
        changes = self._receive()
        assert isinstance(changes, Changes)
        self._pending = False
        self._withdrawn += changes.withdrawn
        self._recalled += changes.recalled
        if changes.revision is not None:
            self._revisions.append(changes.revision)

    def _ask(self, question: Ask) -> object:
        """Sends a question and waits; answers come in the order of the questions."""
        self._channel.send(question)
        if self._pending:
            self._take_changes()
        return self._receive()

    def _receive(self) -> object:
        answer: object = self._channel.receive()
        if isinstance(answer, SourceFailed):
            self._pending = False
            raise EngineError("The source of the requests failed; the parent process knows why.")
        return answer


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
