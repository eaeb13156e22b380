"""Text that Postgres can hold: no NUL, no lone surrogates, no index entry too long."""

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
