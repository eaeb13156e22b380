"""What commands print: one JSON object or a table on stdout, everything else on stderr."""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from flows.tables import text_table

Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]


def print_json(value: Mapping[str, Any]) -> None:
    """Prints one JSON object; numbers that JSON has no word for (infinite, NaN) become null."""
    json.dump(_finite(value), sys.stdout, indent=2, ensure_ascii=False, allow_nan=False, default=str)
    sys.stdout.write("\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


@contextmanager
def errors_about(ids: Mapping[str, str]) -> Iterator[None]:
    """Whatever ends the block early has these ids, as they stand then, beside its own."""
    try:
        yield
    except BaseException as error:
        vars(error)["ids"] = {**getattr(error, "ids", {}), **ids}
        raise


def print_line(text: str) -> None:
    """Prints a line of a command's result."""
    sys.stdout.write(text + "\n")


def tell(text: str) -> None:
    """Says something that is no result, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints an aligned table: first column left, numbers right, no wrapping (so that it can be piped)."""
    sys.stdout.write(text_table(headers, rows) + "\n")
