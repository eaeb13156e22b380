"""Text that Postgres can hold (no NUL, no lone surrogates), and its own messages without values of rows."""

import re
from collections.abc import Mapping, Sequence

_QUOTED_VALUE = re.compile(r': ".*', re.DOTALL)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def clean_text(text: str) -> tuple[str, bool]:
    """The text as Postgres can hold it, and whether anything had to be replaced (by U+FFFD)."""
    # Nearly every text passes one of these two checks, which cost next to nothing.
    if text.isascii():
        return (text, False) if "\0" not in text else (text.replace("\0", _REPLACEMENT), True)
    try:
        text.encode()
        cleaned = text
    except UnicodeEncodeError:
        # Through UTF-16, so that two halves of one character become that character again.
        cleaned = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    cleaned = cleaned.replace("\0", _REPLACEMENT)
    return cleaned, cleaned != text


def cut_text(text: str, max_chars: int) -> str:
    """The text, or its beginning with an ellipsis."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def without_values(message: str | None) -> str | None:
    """A message of the server without the value that it quotes at its end (`invalid input syntax for type
    integer: "…"`)."""
    return None if message is None else _QUOTED_VALUE.sub("", message)


def unstorable_text(value: object, name: str) -> str | None:
    """Where in a JSON-like value Postgres could not hold a text as it is (`spec.sql[0].prompt`); None for
    nowhere.

    Args:
        value: text, number, list or mapping.
        name: what the value is called.
    """
    if isinstance(value, str):
        return name if clean_text(value)[1] else None
    if isinstance(value, Mapping):
        parts = [(one, f"{name}.{clean_text(str(key))[0]}") for key, one in value.items()]
        parts += [(str(key), f"{name}.{clean_text(str(key))[0]}") for key in value]
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        parts = [(one, f"{name}[{index}]") for index, one in enumerate(value)]
    else:
        return None
    return next((found for one, place in parts if (found := unstorable_text(one, place))), None)
