"""What ends a process of vLLM's own: vLLM tells only that its core ended, and logs the reason there."""

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

from blend_core.engines.vllm.error_words import words_of
from blend_core.errors import EngineDiedError

_LOGGERS: Final = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
"""Those in which vLLM's processes log what ends them."""

_CONFIG_VARIABLE: Final = "VLLM_LOGGING_CONFIG_PATH"


class CoreLog:
    """Has vLLM's processes write down the first exception that they log, while it is open.

    Attributes:
        is_kept: whether they do: not where the user has set up vLLM's log himself.
    """

    def __init__(self) -> None:
        """Makes a folder for it."""
        self._folder = tempfile.TemporaryDirectory(prefix="log-", ignore_cleanup_errors=True)
        self._file = Path(self._folder.name) / "error"
        self.is_kept = (
            _CONFIG_VARIABLE not in os.environ and os.environ.get("VLLM_CONFIGURE_LOGGING", "1") != "0"
        )

    @contextmanager
    def starting(self) -> Iterator[None]:
        """For the processes that vLLM starts meanwhile."""
        if not self.is_kept:
            yield
            return
        config = self._file.with_name("logging.json")
        config.write_text(json.dumps(_logging(self._file)))
        os.environ[_CONFIG_VARIABLE] = str(config)
        try:
            yield
        finally:
            del os.environ[_CONFIG_VARIABLE]

    def words(self) -> str | None:
        """What was wrong, in one line; None where none of them said anything."""
        try:
            return self._file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def close(self) -> None:
        """Forgets it. Idempotent."""
        self._folder.cleanup()


class FirstError(logging.Handler):
    """Writes down the first exception that is logged, of all processes."""

    def __init__(self, file: str) -> None:
        """Takes the name of the file, which is not there yet."""
        super().__init__(logging.ERROR)
        self._file = Path(file)

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Exception):
            # Another process may have been first.
            with suppress(OSError), self._file.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(words_of(error))


def core_died(words: str | None = None) -> EngineDiedError:
    """That vLLM's core is gone.

    Args:
        words: what it said last.
    """
    what = "; the log on standard error tells why, unless it was killed" if words is None else f" ({words})"
    return EngineDiedError(f"vLLM's engine core ended{what}. Its unfinished requests run again.")


def _logging(file: Path) -> dict[str, Any]:
    """vLLM's own configuration of its log, with the handler."""
    from vllm.logger import DEFAULT_LOGGING_CONFIG

    config: dict[str, Any] = deepcopy(DEFAULT_LOGGING_CONFIG)
    config["handlers"]["first_error"] = {"class": f"{__name__}.{FirstError.__name__}", "file": str(file)}
    config["loggers"].update({name: {"handlers": ["first_error"]} for name in _LOGGERS})
    return config
