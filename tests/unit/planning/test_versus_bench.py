"""The comparison with vLLM's own batch runner: what makes it no comparison, and its processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from blend_core.engines.vllm.installed import InstalledVllm
from blend_core.errors import EngineError
from flows.bench import versus
from flows.bench.versus_process import RunFigures, VersusRun
from flows.settings import EngineSettings, Settings

SETTINGS = Settings(engine=EngineSettings(device="cpu"))


@pytest.fixture
def prompt_tokens(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Tokens that a way to run the file says it computed, 1,200 unless put in here; nothing is run."""
    told: dict[str, int] = {}

    def measure(run: VersusRun, folder: Path) -> tuple[RunFigures, float]:
        busy_s = 4.0 if run.name == "run-batch" else 2.0
        return RunFigures(told.get(run.name, 1200), 80, busy_s, 0.5, 0, 0.0, 0.0), 9.0

    monkeypatch.setattr(versus, "_measure", measure)
    monkeypatch.setattr(versus, "_model_folder", lambda settings, model, folder: folder)
    monkeypatch.setattr(versus, "installed_vllm", lambda: InstalledVllm("0.32.0", "cpu"))
    return told


@pytest.mark.usefixtures("prompt_tokens")
def test_speeds_are_compared_with_those_of_run_batch() -> None:
    lines: list[str] = []
    found = versus.run_versus_bench(SETTINGS, "random-llama", 8, 2, lines.append)
    assert lines[0] == "vllm 0.32.0 under each policy, beside its own batch runner (run-batch)"
    ratios = {run.name: run.ratio_to_run_batch for setting in found.settings for run in setting.runs}
    assert ratios == {"run-batch": 1, "fcfs": 2, "dfs": 2, "dual_scan": 2, "density_matched": 2}


def test_ways_that_did_not_compute_the_same_prompts_are_not_compared(prompt_tokens: dict[str, int]) -> None:
    prompt_tokens["dfs"] = 1201
    with pytest.raises(EngineError, match=r"1,200 tokens under run-batch and 1,201 under dfs, so .*; take a"):
        versus.run_versus_bench(SETTINGS, "random-llama", 8, 1, lambda line: None)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_ends_with_whoever_waits_for_it(by: signal.Signals, tmp_path: Path) -> None:
    never_written = tmp_path / "run.json"
    os.mkfifo(never_written)
    # A shell that starts programs in the background has them ignore SIGINT.
    code = f"""
import pathlib, signal, sys
from flows.bench.versus import run_process
signal.signal(signal.SIGINT, signal.default_int_handler)
run_process(pathlib.Path({str(never_written)!r}), sys.stderr.buffer)
"""
    waiting = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    writing = None
    try:
        writing = open_once_read(never_written)
        (run,) = psutil.Process(waiting.pid).children()
        waiting.send_signal(by)
        waiting.wait(10)
        deadline = time.monotonic() + 10
        while not has_ended(run):
            assert time.monotonic() < deadline, "the run goes on"
            time.sleep(0.05)
    finally:
        waiting.kill()
        waiting.wait()
        if writing is not None:
            os.close(writing)


def open_once_read(fifo: Path) -> int:
    """Opens it for writing when the other end is open, within a minute."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert time.monotonic() < deadline, "nobody reads"
            time.sleep(0.05)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
