"""vLLM's own words for what is wrong: short enough for an error of ours, and in full on standard error."""

import re
import sys
import traceback
from typing import Final

from blend_core.errors import EngineStartError

MOST_CHARACTERS: Final = 300
"""Of vLLM's own words in an error."""

_SOURCE_LINE: Final = re.compile(r"\[[\d:]+\] \S+\.cc:\d+: ")
"""Time and place in the source of its libraries, in front of what they say."""


def start_error(error: Exception, cause: str | None = None) -> EngineStartError:
    """What is told where vLLM does not start, once all that vLLM said is on standard error.

    Of errors before its core starts vLLM itself prints nothing.

    Args:
        error: what vLLM raised.
        cause: what the process said that did not start, where it was another one.
    """
    traceback.print_exception(error, file=sys.stderr)
    return EngineStartError(
        f"vLLM did not start ({cause or words_of(error)}); the log on standard error has the details."
    )


def words_of(error: Exception) -> str:
    """What vLLM says is wrong, in one line."""
    told = str(error)
    words = next(iter(told.splitlines()), "")
    if words.rstrip().endswith(":"):
        # What is wrong stands in the lines below.
        words = " ".join(told.split())
    words = _SOURCE_LINE.sub("", words)
    listed = getattr(error, "errors", None)
    if type(error).__name__ == "ValidationError" and callable(listed):
        # The first line of one of pydantic's tells how many things are wrong, and not which.
        first = listed()[0]
        words = " ".join([*(f"{part}:" for part in first["loc"]), first["msg"]])
    if len(words) > MOST_CHARACTERS:
        words = words[:MOST_CHARACTERS] + "…"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
