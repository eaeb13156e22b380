import errno
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from blend_core.engines.process_group import end_group

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def family():
    """A process that leads a group, and its child's pid."""
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        yield leader, int(leader.stdout.readline())
        leader.kill()


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_all_of_a_group_are_gone_when_it_returns(family):
    leader, child = family
    end_group(leader.pid)
    assert not is_alive(child)
    assert leader.poll() == -signal.SIGKILL


def test_what_has_ended_and_nobody_looks_at_is_not_waited_for(family):
    leader, child = family
    leader.kill()
    os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
    begin_s = time.monotonic()
    end_group(leader.pid)
    assert time.monotonic() - begin_s < 5
    assert not is_alive(child)


def test_a_process_that_ends_its_own_group_is_the_last():
    ending = FAMILY.replace("time.sleep(600)\n", "end_group(os.getpgrp())\nprint('last', flush=True)\n")
    program = f"import os\nfrom blend_core.engines.process_group import end_group\n{ending}"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    child, last = ended.stdout.split()
    assert last == "last", ended.stderr
    assert not is_alive(int(child))


def test_a_process_whose_first_thread_has_ended_is_ended_too():
    program = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True
    ) as half:
        assert half.stdout is not None
        half.stdout.readline()
        deadline_s = time.monotonic() + 10
        while is_alive(half.pid) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        end_group(half.pid)
        try:
            assert half.wait(5) == -signal.SIGKILL
        finally:
            half.kill()


def test_without_a_descriptor_left_a_group_is_killed_all_the_same(family, monkeypatch):
    leader, child = family

    def no_descriptor():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(psutil, "process_iter", no_descriptor)
    end_group(leader.pid)
    assert leader.wait(5) == -signal.SIGKILL
    deadline_s = time.monotonic() + 5
    while is_alive(child) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not is_alive(child)
