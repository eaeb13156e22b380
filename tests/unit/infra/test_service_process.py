import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from blend_core.errors import ServiceError
from infra.processes import ServiceProcess

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = [
    *(sys.executable, "-c"),
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); "
    "time.sleep(600)",
]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ServiceProcess]:
    for part in ("processes", "logs"):
        (tmp_path / part).mkdir()
    process = ServiceProcess("sample", tmp_path)
    yield process
    process.stop([(signal.SIGTERM, 2.0)])


def test_it_is_found_again_by_another_object(process: ServiceProcess, tmp_path: Path) -> None:
    process.launch(SLEEP, environment={}, fingerprint="settings")
    other = ServiceProcess("sample", tmp_path)
    assert other.pid == process.pid
    assert other.fingerprint == "settings"
    assert other.since is not None


def test_it_leads_a_session_of_its_own(process: ServiceProcess) -> None:
    process.launch(SLEEP, environment={})
    assert process.pid is not None
    assert os.getsid(process.pid) == process.pid != os.getsid(0)


def test_one_deaf_to_sigterm_is_killed(process: ServiceProcess) -> None:
    process.launch(STUBBORN, environment={})
    process.wait_until(lambda: "deaf" in process.log_file.read_text(), timeout_s=20)
    pid = process.pid
    assert pid is not None

    process.stop([(signal.SIGTERM, 0.3)])

    assert process.pid is None
    assert not psutil.pid_exists(pid)


def test_a_reused_pid_is_not_mistaken_for_it(process: ServiceProcess, tmp_path: Path) -> None:
    process.launch(SLEEP, environment={})
    record = tmp_path / "processes" / "sample.json"
    text = record.read_text().replace(f'"pid": {process.pid}', f'"pid": {os.getpid()}')
    process.stop([(signal.SIGTERM, 2.0)])
    record.write_text(text)

    assert process.pid is None
    process.stop([(signal.SIGTERM, 0.1)])  # this test would not survive it


def test_one_that_ends_at_once_is_told_with_its_last_words(process: ServiceProcess) -> None:
    process.launch([sys.executable, "-c", "raise SystemExit('no such port')"], environment={})
    with pytest.raises(ServiceError, match="no such port"):
        process.wait_until(lambda: False, timeout_s=20)


def test_one_that_never_answers_is_told(process: ServiceProcess) -> None:
    process.launch(SLEEP, environment={})
    with pytest.raises(ServiceError, match="did not answer"):
        process.wait_until(lambda: False, timeout_s=0.2)


def test_a_missing_program_is_told(process: ServiceProcess) -> None:
    with pytest.raises(ServiceError, match="cannot be started"):
        process.launch(["/no/such/program"], environment={})


def test_what_it_started_in_another_session_ends_with_it(process: ServiceProcess) -> None:
    program = (
        "import subprocess, sys, time; "
        "command = [sys.executable, '-c', 'import time; time.sleep(600)']; "
        "child = subprocess.Popen(command, start_new_session=True); "
        "print(child.pid, flush=True); time.sleep(600)"
    )
    process.launch([sys.executable, "-c", program], environment={})
    process.wait_until(lambda: process.log_file.read_text().endswith("\n"), timeout_s=20)
    child = psutil.Process(int(process.log_file.read_text()))

    process.stop([(signal.SIGTERM, 2.0)])

    deadline_s = time.monotonic() + 5
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_it_knows_what_it_started(process: ServiceProcess) -> None:
    process.launch(SLEEP, environment={})
    assert process.pid is not None
    process.wait_until(lambda: process.has_started(process.pid or 0), timeout_s=20)
    assert not process.has_started(os.getppid())
