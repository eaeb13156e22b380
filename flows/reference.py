"""Reference tables in the documentation, generated from the models that the program reads.

`python -m flows.reference` writes them between the marks in README.md and docs/; a test fails when one
has drifted.
"""

import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from flows.job_spec import BatchJobSpec
from flows.settings import Settings


def settings_table() -> str:
    """Every environment variable with its default and meaning, as a Markdown table."""
    rows = [
        (name, _default(field), field.description or "") for name, field in _variables(Settings, "BLEND_")
    ]
    return _table(("variable", "default", "meaning"), rows)


def job_file_table() -> str:
    """Every field of a job file with its default and meaning, as a Markdown table."""
    rows = [(name, _default(field), field.description or "") for name, field in _fields(BatchJobSpec, "")]
    return _table(("field", "default", "meaning"), rows)


DOCUMENTS: dict[str, tuple[str, Callable[[], str]]] = {
    "README.md": ("settings", settings_table),
    "docs/jobs.md": ("job-file", job_file_table),
}


def with_table(text: str, mark: str, table: str) -> str:
    """The document with the table between its marks `<!-- mark -->` and `<!-- /mark -->`.

    Raises:
        ValueError: the document lacks the marks.
    """
    start, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, found_start, rest = text.partition(start)
    _, found_end, after = rest.partition(end)
    if not found_start or not found_end:
        raise ValueError(f"The document lacks the marks {start} and {end}.")
    return f"{before}{start}\n{table}\n{end}{after}"


def _variables(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        part = _model_of(field)
        if part is not None:
            yield from _variables(part, f"{prefix}{name.upper()}__")
        elif field.validation_alias is not None:
            yield str(field.validation_alias), field
        elif field.annotation is not None and "dict" in str(field.annotation):
            yield f"{prefix}{name.upper()}__NAME", field
        else:
            yield f"{prefix}{name.upper()}", field


def _fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        part = _model_of(field)
        if part is not None:
            is_list = str(field.annotation).startswith("list")
            yield from _fields(part, f"{prefix}{name}{'[]' if is_list else ''}.")


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    candidates: list[Any] = [field.annotation, *get_args(field.annotation)]
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is PydanticUndefined or value is None or isinstance(value, BaseModel):
        return ""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        value = str(value).lower()
    return f"`{value}`"


def _table(headers: tuple[str, ...], rows: list[tuple[str, str, str]]) -> str:
    lines = [f"| {' | '.join(headers)} |", f"|{'---|' * len(headers)}"]
    for name, default, meaning in rows:
        lines.append(f"| `{name}` | {default} | {meaning.replace('|', '&#124;')} |")
    return "\n".join(lines)


def main() -> None:
    """Writes every table into its document, in the folder given or the working folder."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd()
    for name, (mark, table) in DOCUMENTS.items():
        path = root / name
        path.write_text(with_table(path.read_text(encoding="utf-8"), mark, table()), encoding="utf-8")


if __name__ == "__main__":
    main()
