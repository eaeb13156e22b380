"""What is told of a core that does not start: it is another process, and vLLM tells only that it failed."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from blend_core.engines.process import EngineProcess
from blend_core.engines.vllm.factory import make_vllm_engine
from blend_core.errors import EngineDiedError, EngineStartError
from tests.integration.engines_vllm.vllm_runs import options

pytestmark = pytest.mark.slow


def test_the_cores_own_reason_is_told(tiny_llama: Path) -> None:
    passed = {"separate_core": True, "kv_cache_memory_bytes": 5000 << 30}
    process = EngineProcess(partial(make_vllm_engine, options(tiny_llama, passed=passed)))
    try:
        with pytest.raises(EngineStartError, match=r"vLLM did not start \(ValueError: .*5000"):
            process.open()
    finally:
        process.close()


def test_a_core_that_is_killed_while_it_loads_is_one_that_died(tiny_llama: Path) -> None:
    process = EngineProcess(partial(make_vllm_engine, options(tiny_llama, passed={"separate_core": True})))
    killer = threading.Thread(target=kill_the_core_of, args=(process,))
    killer.start()
    try:
        with pytest.raises(EngineDiedError, match="engine core ended while it loaded"):
            process.open()
    finally:
        killer.join()
        process.close()


def kill_the_core_of(process: EngineProcess) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for found in psutil.Process(process.pid).children() if process.pid is not None else ():
            if "EngineCore" in " ".join(found.cmdline()):
                os.kill(found.pid, signal.SIGKILL)
                return
        time.sleep(0.05)
