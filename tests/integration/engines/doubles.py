"""Engines and programs for the tests of engine processes; imported by name in child processes."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from blend_core.engines.base import (
    Engine,
    EngineEvent,
    EngineInfo,
    RequestFinished,
    RequestsAdmitted,
    RequestSource,
)
from blend_core.errors import BlendError, EngineStartError
from blend_core.policies.base import EngineLimits
from blend_core.specs import DeviceProfile, ModelSpec

INFO = EngineInfo(
    engine="echo",
    model=ModelSpec("none", 1, 1, 1, 1, 1, 1, 4, 10, 10),
    device=DeviceProfile("none", 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0),
    limits=EngineLimits(16, 1, 1, 1),
    details={},
)


class EchoEngine:
    """Ends each request of the plan at once; `mode` makes it misbehave."""

    def __init__(self, mode: str = "") -> None:
        self._mode = mode

    def open(self) -> EngineInfo:
        if self._mode == "refuse":
            raise EngineStartError("There is no such device; choose another one.", rank=3)
        if self._mode == "break in open":
            raise RuntimeError("secret prompt")
        if self._mode == "exit in open":
            os._exit(7)
        if self._mode == "print":
            print("on standard output")  # noqa: T201
        if self._mode == "grandchild":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            details = {"pid": str(child.pid), "folder": put_something_down()}
            return EngineInfo("echo", INFO.model, INFO.device, INFO.limits, details)
        return INFO

    def run(self, source: RequestSource) -> Iterator[EngineEvent]:
        plan = source.plan()
        if self._mode == "start the first":
            yield from self._start_the_first(int(plan.seq[0]), source)
            return
        for seq in plan.seq.tolist():
            (request,) = source.fetch([seq])
            if self._mode == "break" and seq == 3:
                raise RuntimeError("secret prompt")
            if self._mode == "break after a question" and seq == 3:
                source.revision()
                raise RuntimeError("after a question")
            if self._mode == "break on a file" and seq == 3:
                raise FileNotFoundError("secret path")
            yield RequestFinished(
                seq, plan.revision, "", (1,), "stop", request.num_prompt_tokens, 0, time.time(), time.time()
            )
        if self._mode == "look for changes last":
            source.withdrawn()
        while self._mode == "wait for a change":
            withdrawn, revision = source.withdrawn(), source.revision()
            if withdrawn:
                yield RequestFinished(withdrawn[0], 0, "withdrawn", (1,), "stop", 1, 0, 0.0, 0.0)
            if revision is not None:
                yield RequestFinished(
                    int(revision.seq[0]), revision.revision, "", (1,), "stop", 1, 0, 0.0, 0.0
                )
                return
            time.sleep(0.01)

    def _start_the_first(self, first: int, source: RequestSource) -> Iterator[EngineEvent]:
        """Starts one request and waits until others are to be dropped; its answer says which."""
        yield RequestsAdmitted((first,))
        dropped: list[int] = []
        while not dropped:
            dropped += source.withdrawn()
            time.sleep(0.01)
        yield RequestFinished(first, 0, str(dropped), (1,), "stop", 1, 0, 0.0, 0.0)

    def close(self) -> None:
        pass


def put_something_down() -> str:
    """Leaves a temporary file, in a folder that is returned."""
    handle, path = tempfile.mkstemp()
    os.close(handle)
    return str(Path(path).parent)


def make_echo(mode: str = "") -> Engine:
    return EchoEngine(mode)


def print_why_an_engine_does_not_open(make_engine: Callable[[], Engine]) -> None:
    """A parent program: prints the type and the message of what `open` raises."""
    from blend_core.engines.process import EngineProcess

    try:
        EngineProcess(make_engine).open()
    except BlendError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}")


def hold_an_engine_open() -> None:
    """A parent program: opens an engine with a child of its own, tells both pids and where they put things
    down, never ends by itself."""
    from functools import partial

    from blend_core.engines.process import EngineProcess

    process = EngineProcess(partial(make_echo, "grandchild"))
    info = process.open()
    sys.stdout.write(f"{process.pid} {info.details['pid']} {info.details['folder']}\n")
    sys.stdout.flush()
    time.sleep(600)
