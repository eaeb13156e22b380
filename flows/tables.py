"""Tables as plain text and as Markdown, for terminals, pipes and artifacts."""

from collections.abc import Iterable, Sequence


def text_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An aligned table without wrapping: columns of numbers to the right, None shown as `-`."""
    cells = [[cell_text(value) for value in row] for row in rows]
    widths = [max([len(header), *(len(row[i]) for row in cells)]) for i, header in enumerate(headers)]
    right = [_is_numeric([row[i] for row in cells]) for i in range(len(headers))]
    lines = [list(headers), ["-" * width for width in widths], *cells]
    return "\n".join(_aligned(line, widths, right) for line in lines)


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The same as a Markdown table."""
    cells = [[cell_text(value).replace("|", "&#124;") for value in row] for row in rows]
    right = [_is_numeric([row[i] for row in cells]) for i in range(len(headers))]
    rule = "|".join("---:" if is_right else "---" for is_right in right)
    lines = [" | ".join(line) for line in [list(headers), *cells]]
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def cell_text(value: object) -> str:
    """A value in one line: numbers with separators, None as `-`."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return " ".join(str(value).split())


def percent_text(share: float | None) -> str:
    """A share as a percentage with one decimal, None as `-`."""
    return "-" if share is None else f"{share:.1%}"


def _is_numeric(column: Sequence[str]) -> bool:
    values = [value.strip(" %xs+-") for value in column if value != "-"]
    return bool(values) and all(value.replace(",", "").replace(".", "", 1).isdigit() for value in values)


def _aligned(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    parts = [
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(cells, widths, right, strict=True)
    ]
    return "  ".join(parts).rstrip()
