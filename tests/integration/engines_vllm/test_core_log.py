"""What is told of a core that does not start: it is another process, and vLLM tells only that it failed."""

import inspect
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from blend_core.engines.process import EngineProcess
from blend_core.engines.vllm.core_log import _LOGGERS
from blend_core.engines.vllm.factory import make_vllm_engine
from blend_core.errors import EngineDiedError, EngineStartError
from tests.integration.engines_vllm.vllm_runs import options

pytestmark = pytest.mark.slow


def test_the_cores_own_reason_is_told(tiny_llama: Path) -> None:
    passed = {"separate_core": True, "num_gpu_blocks_override": 2, "max_model_len": 512}
    process = EngineProcess(partial(make_vllm_engine, options(tiny_llama, passed=passed)))
    try:
        with pytest.raises(EngineStartError, match=r"vLLM did not start \(ValueError: .*KV cache"):
            process.open()
    finally:
        process.close()


def test_vllms_processes_log_what_ends_them_where_it_is_kept() -> None:
    from vllm.v1.engine import core
    from vllm.v1.executor import multiproc_executor

    for module in (core, multiproc_executor):
        assert module.logger.name in _LOGGERS
    assert 'logger.exception("EngineCore encountered a fatal error.")' in inspect.getsource(core)
    assert 'logger.exception("WorkerProc failed to start.")' in inspect.getsource(multiproc_executor)


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
