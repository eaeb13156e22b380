"""An engine in a process of its own, in a process group of its own, that ends with its parent.

`EngineProcess` is an `Engine` around any other one. The child is a fresh interpreter (nothing of the parent's
main module runs in it), so it may be started from any thread of any program. A thread in the parent serves
the child: it answers from the `RecallingSource` and queues events, at most a few hundred, so that a slow
reader slows the engine down instead of filling memory.
"""

import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from blend_core.engines.base import Engine, EngineEvent, EngineInfo, RecallingSource
from blend_core.engines.process_group import end_group
from blend_core.engines.process_messages import (
    Answer,
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
from blend_core.errors import ConfigurationError, EngineDiedError, EngineError, EngineStartError

_MAX_QUEUED_EVENTS = 256
_POLL_S = 0.5

EngineFactory = Callable[[], Engine]


class EngineProcess:
    """Runs the engine that a factory makes in a child process.

    `open`, `run` and `close` may be called from any thread, one at a time; the source is asked from another
    thread than the one that reads the events.
    """

    def __init__(self, make_engine: EngineFactory, held_files: Sequence[int] = ()) -> None:
        """Starts nothing yet.

        Args:
            make_engine: called in the child. Must be picklable: a function of an importable module, or a
                `functools.partial` of one over picklable options.
            held_files: open file descriptors that the child inherits and keeps open until it ends.

        Raises:
            ConfigurationError: the factory cannot be pickled.
        """
        try:
            self._pickled_factory = pickle.dumps(make_engine)
        except Exception as error:  # pickle raises what the object's own methods raise
            raise ConfigurationError(
                f"The engine factory cannot be sent to a process ({type(error).__name__}); "
                "give a function of an importable module."
            ) from error
        self._held_files = tuple(held_files)
        self._child: _Child | None = None
        self._info: EngineInfo | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child, and id of its process group; None while there is none."""
        return self._child.pid if self._child is not None else None

    def open(self) -> EngineInfo:
        """Starts the child and opens the engine in it; see `Engine.open`.

        Raises what the engine's own `open` raises, and `EngineDiedError` when the child ends instead.
        """
        if self._info is None:
            self._child = _Child(self._pickled_factory, self._held_files)
            try:
                opened = self._child.next_message()
            except BaseException:
                self.close()
                raise
            assert isinstance(opened, Opened)
            self._info = opened.info
        return self._info

    def run(self, source: RecallingSource) -> Iterator[EngineEvent]:
        """Runs everything in the source; see `Engine.run`. Giving a run up half-way closes the engine.

        What the source asks back is answered between two steps by `RequestsReleased`, exactly: the requests
        that it names as released never started. What was asked back last may stay without an answer when
        the run ends; nothing of it has started then that was not told.
        """
        if self._child is None:
            raise EngineError("The engine is not open; call open() before run().")
        return self._events(self._child, source)

    def _events(self, child: "_Child", source: RecallingSource) -> Iterator[EngineEvent]:
        through = False
        child.start_run(source)
        try:
            while True:
                message = child.next_message()
                if isinstance(message, RunEnded):
                    through = True
                    return
                assert isinstance(message, Happened)
                yield message.event
        finally:
            if not through and self._child is child:
                self.close()

    def kill(self) -> None:
        """Kills the child's process group, from any thread: who waits for its events is told that it died.

        Does nothing where there is no child, or none any more.
        """
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """Kills the child's process group and waits for it. Idempotent."""
        child, self._child, self._info = self._child, None, None
        if child is not None:
            child.end()


class _Child:
    """One child process with the thread that serves it, and a folder of its own for temporary files."""

    def __init__(self, pickled_factory: bytes, held_files: tuple[int, ...]) -> None:
        self._folder = _temporary_folder()
        ours, theirs = socket.socketpair()
        lifeline_read, self._lifeline = os.pipe()
        command = [sys.executable, "-P", "-m", "blend_core.engines.process_child"]
        with theirs:
            try:
                self._process = subprocess.Popen(  # noqa: S603 - this interpreter, this package
                    [*command, str(theirs.fileno()), str(lifeline_read), self._folder],
                    stdin=subprocess.DEVNULL,
                    # The parent's results go to standard output, so nothing of the child's may.
                    stdout=2,
                    pass_fds=(theirs.fileno(), lifeline_read, *held_files),
                    start_new_session=True,
                    env=_child_environment(self._folder),
                )
            except OSError as error:
                ours.close()
                os.close(self._lifeline)
                shutil.rmtree(self._folder)
                raise EngineStartError(
                    f"The engine process cannot be started ({error.strerror}); free memory or end processes."
                ) from error
            finally:
                os.close(lifeline_read)
        self._channel = Connection(ours.detach())
        with suppress(OSError):  # a dead child is reported by the serving thread
            self._channel.send_bytes(pickled_factory)
        self._inbox: queue.Queue[Opened | Happened | RunEnded | Exception] = queue.Queue(_MAX_QUEUED_EVENTS)
        self._ending = threading.Event()
        self._kill_lock = threading.Lock()
        self._is_killed = False
        self._source: RecallingSource | None = None
        self._source_error: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name=f"engine-{self.pid}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start_run(self, source: RecallingSource) -> None:
        self._source = source
        self._source_error = None
        with suppress(OSError):  # a dead child is reported by the serving thread
            self._channel.send(StartRun())

    def next_message(self) -> Opened | Happened | RunEnded:
        """The next message for the engine's user. Raises what ended the child or failed in it."""
        message = self._inbox.get()
        if isinstance(message, Exception):
            raise message
        return message

    def end(self) -> None:
        """Kills the group, joins process and thread. Once only."""
        self._ending.set()
        self.kill()
        if self._thread is not threading.current_thread():
            self._thread.join()
        with suppress(queue.Full):  # a reader that waits finds the queue empty, and waits no longer
            self._inbox.put_nowait(_died(self._process.returncode))
        self._channel.close()
        with suppress(OSError):
            os.close(self._lifeline)

    def kill(self) -> None:
        """Kills the group, waits for its end and removes its folder, unless that was done before."""
        with self._kill_lock:
            if self._is_killed:
                return  # its number may be another group's by now
            self._is_killed = True
            end_group(self.pid)
            self._process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        broken: EngineError | None = None
        try:
            self._serve_until_gone()
        except (EOFError, OSError):
            pass  # the child is gone, or going
        except Exception as error:  # the reader waits for this thread, so nothing may end it in silence
            broken = EngineError(
                f"A message between the engine process and this one failed with {type(error).__name__}; "
                "report this."
            )
            broken.__cause__ = error
        if not self._ending.is_set():
            self.kill()
            self._put(broken or _died(self._process.returncode))

    def _serve_until_gone(self) -> None:
        while not self._ending.is_set():
            if self._channel.poll(_POLL_S):
                self._take(self._channel.recv())
            elif self._process.poll() is not None and not self._channel.poll():
                return  # looked at once more: its last words may have come between the two questions

    def _take(self, message: object) -> None:
        if isinstance(message, AskPlan | AskRequests | AskChanges):
            self._channel.send(self._answer(message))
        elif isinstance(message, Failed):
            self._put(self._source_error or message.error)
        else:
            assert isinstance(message, Opened | Happened | RunEnded)
            self._put(message)

    def _answer(self, question: Ask) -> Answer:
        source = self._source
        assert source is not None, "the child asked outside a run"
        try:
            match question:
                case AskPlan():
                    return source.plan()
                case AskRequests(seqs):
                    return tuple(source.fetch(seqs))
                case AskChanges():
                    # In this order: a revision leaves out what was withdrawn or recalled before it.
                    withdrawn, recalled = tuple(source.withdrawn()), tuple(source.recalled())
                    return Changes(source.revision(), withdrawn, recalled)
        except Exception as error:  # whatever the source raises is its user's to see
            self._source_error = error
            return SourceFailed()

    def _put(self, message: Opened | Happened | RunEnded | Exception) -> None:
        """Queues for the reader; waits while the queue is full, but not beyond the end."""
        while not self._ending.is_set():
            with suppress(queue.Full):
                self._inbox.put(message, timeout=_POLL_S)
                return


def _temporary_folder() -> str:
    """A folder for what the child and its own processes put down, vLLM's sockets say.

    They are killed in the end, and clean nothing up themselves.
    """
    try:
        # A short name: the path of a socket in it has room for about a hundred characters in all.
        return tempfile.mkdtemp(prefix="blend-")
    except OSError as error:
        raise EngineStartError(
            f"The engine process finds no folder for temporary files ({error.strerror}); make room there, or "
            "let TMPDIR name a folder of yours."
        ) from error


def _child_environment(folder: str) -> dict[str, str]:
    """The parent's, with its import path. Idle compute threads sleep rather than spin, unless it says so.

    On a machine that does other work too, spinning threads starve one another to a fraction of the speed.
    What torch compiles is kept for the next one, beside the child's own folder.
    """
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    compiled = str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}")
    defaults = {"OMP_WAIT_POLICY": "PASSIVE", "TORCHINDUCTOR_CACHE_DIR": compiled}
    return {**defaults, **os.environ, "PYTHONPATH": path, "TMPDIR": folder}


def _died(return_code: int) -> EngineDiedError:
    if return_code < 0:
        names = {number.value: number.name for number in signal.Signals}
        how = f"was killed by signal {names.get(-return_code, -return_code)}"
        if -return_code == signal.SIGKILL:
            how += ", as the kernel does when memory runs out"
    else:
        how = f"ended with exit status {return_code}"
    return EngineDiedError(
        f"The engine process {how}; its unfinished requests run again with the next one.",
        return_code=return_code,
    )
