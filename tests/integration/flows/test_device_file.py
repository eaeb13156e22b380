"""A device is free for the next engine when the one before is gone, also where its parent was killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from blend_core.engines.process import EngineProcess
from flows.device_file import device_file
from flows.stopping import StopReason, StopSignal
from tests.integration.engines.doubles import make_echo

PARENT = """
import os, sys, time
from functools import partial
from blend_core.engines.process import EngineProcess
from flows.device_file import device_file
from flows.stopping import StopSignal
from tests.integration.engines.doubles import make_echo

with device_file("db", device="gpu", stop=StopSignal(), waiting=print) as file:
    engine = EngineProcess(partial(make_echo, "grandchild"), (file,))
    engine.open()
    print(engine.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))


def ignore(line: str) -> None:
    pass


def test_the_next_run_starts_when_the_engine_of_a_killed_process_is_gone() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        # A stopped engine cannot notice that its parent died: the device must stay taken as long.
        os.kill(pid, signal.SIGSTOP)
        # Until the stop has reached it, a thread of it that sees the parent's end may still act on that.
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        parent.kill()
        parent.wait()
        notes: list[str] = []
        free_at: list[float] = []

        def take() -> None:
            with device_file("db", device="gpu", stop=StopSignal(), waiting=notes.append) as file:
                assert file is not None
                free_at.append(time.monotonic())

        waiter = threading.Thread(target=take)
        waiter.start()
        waiter.join(1.0)
        assert not free_at
        assert notes == ["Waiting for the engine of a run that died to leave gpu."]
        os.kill(pid, signal.SIGCONT)
        waiter.join(5.0)
        assert free_at


def test_other_devices_and_other_databases_are_not_waited_for() -> None:
    with (
        device_file("db", device="gpu", stop=StopSignal(), waiting=ignore) as one,
        device_file("db", device="gpu:1", stop=StopSignal(), waiting=ignore) as two,
        device_file("db2", device="gpu", stop=StopSignal(), waiting=ignore) as three,
    ):
        assert None not in (one, two, three)


def test_a_stop_ends_the_wait() -> None:
    stop = StopSignal()
    with device_file("db", device="gpu", stop=StopSignal(), waiting=ignore):
        threading.Timer(0.3, stop.request, [StopReason.CANCELLED]).start()
        with device_file("db", device="gpu", stop=stop, waiting=ignore) as file:
            assert file is None


def test_an_engine_that_is_closed_leaves_the_device() -> None:
    with device_file("db", device="gpu", stop=StopSignal(), waiting=ignore) as file:
        assert file is not None
        engine = EngineProcess(partial(make_echo, "grandchild"), (file,))
        engine.open()
        engine.close()
    with device_file("db", device="gpu", stop=StopSignal(), waiting=pytest.fail) as file:
        assert file is not None
