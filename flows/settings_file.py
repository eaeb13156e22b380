"""The lines of `blend.env`: `NAME=value`, each value taken as it stands."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dotenv.parser import Binding, parse_stream

from blend_core.errors import ConfigurationError


class SettingsLine(NamedTuple):
    """A variable of the file.

    Attributes:
        name: in capitals; settings are known by any case.
        value: without its quotes; nothing in it is replaced by the value of another variable.
        number: of its line, from 1.
    """

    name: str
    value: str
    number: int


def read_settings_file(file: Path) -> list[SettingsLine]:
    """The variables of the file from top to bottom; none where it is not there.

    Raises:
        ConfigurationError: the file cannot be read, or a line is no `NAME=value`; names the file and the
            line, and no value, which may be a password.
    """
    try:
        with file.open(encoding="utf-8-sig") as stream:
            return list(_lines(file, parse_stream(stream)))
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{file} cannot be read ({type(error).__name__}); make it a text file that you may read."
        ) from None


def _lines(file: Path, bindings: Iterator[Binding]) -> Iterator[SettingsLine]:
    for name, value, original, is_wrong in bindings:
        text = original.string.lstrip()
        number = original.line + original.string[: len(original.string) - len(text)].count("\n")
        # A quote that is closed lines below has swallowed the variables in between.
        if is_wrong or "\n" in text.rstrip() or (name is not None and value is None):
            raise ConfigurationError(
                f"Line {number} of {file} is no variable; write it as NAME=value on one line, and close a "
                "quote at its end."
            )
        if name is not None and value is not None:
            yield SettingsLine(name.upper(), value, number)
