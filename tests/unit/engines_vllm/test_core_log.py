"""Of what vLLM's processes log the first exception is kept, and vLLM's environment stays as it was."""

import json
import logging
import logging.config
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from blend_core.engines.vllm.core_log import CoreLog, core_died

VARIABLE = "VLLM_LOGGING_CONFIG_PATH"


@pytest.fixture(autouse=True)
def _vllm_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm.logger")
    module.DEFAULT_LOGGING_CONFIG = {  # type: ignore[attr-defined]
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {},
        "loggers": {"vllm": {"propagate": False}},
    }
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.logger", module)
    monkeypatch.delenv(VARIABLE, raising=False)


def fail(logger: str, error: Exception) -> None:
    """As a process of vLLM's ends, one that started where the variable is set."""
    if VARIABLE in os.environ:
        logging.config.dictConfig(json.loads(Path(os.environ[VARIABLE]).read_bytes()))
    try:
        raise error
    except type(error):
        logging.getLogger(logger).exception("a fatal error")


def test_the_first_error_of_all_is_told_until_the_log_is_closed() -> None:
    log = CoreLog()
    with log.starting():
        assert log.words() is None
        fail("vllm.v1.executor.multiproc_executor", MemoryError("CUDA out of memory\nTry less."))
    assert VARIABLE not in os.environ
    fail("vllm.v1.engine.core", RuntimeError("A worker failed."))
    assert log.words() == "MemoryError: CUDA out of memory"
    log.close()
    log.close()
    assert log.words() is None
    fail("vllm.v1.engine.core", ValueError("when nobody asks any more"))


def test_of_one_that_ends_later_the_error_is_told_too() -> None:
    log = CoreLog()
    with log.starting():
        fail("vllm.elsewhere", ValueError("of another part"))
        logging.getLogger("vllm.v1.engine.core").error("no exception")
    assert log.words() is None
    fail("vllm.v1.engine.core", ValueError("later"))
    assert log.words() == "ValueError: later"
    assert str(core_died(log.words())).startswith("vLLM's engine core ended (ValueError: later). Its ")
    log.close()


def test_an_error_about_a_file_whose_name_is_no_text_is_told() -> None:
    log = CoreLog()
    with log.starting():
        fail("vllm.v1.engine.core", FileNotFoundError(os.fsdecode(b"/models/caf\xe9 is gone")))
    assert log.words() == r"FileNotFoundError: /models/caf\udce9 is gone"
    log.close()


@pytest.mark.parametrize(("name", "value"), [(VARIABLE, "/etc/log.json"), ("VLLM_CONFIGURE_LOGGING", "0")])
def test_a_log_that_the_user_has_set_up_stays(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    log = CoreLog()
    with log.starting():
        assert not log.is_kept
        assert os.environ.get(VARIABLE) == (value if name == VARIABLE else None)
    assert os.environ[name] == value
    log.close()
