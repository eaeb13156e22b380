"""What the studies of `blend bench` write: tables, sections of Markdown files, plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.output import print_line, print_table, tell

if TYPE_CHECKING:
    from flows.bench.study_tables import Table


def prepare_outputs(plots: Path | None, docs: Path | None, section: str) -> None:
    """Refuses, before hours of work, what their figures could not be written to."""
    if plots is not None:
        from flows.bench.study_plots import prepare_plots

        prepare_plots(plots)
    if docs is not None:
        from flows.bench.study_tables import section_of

        section_of(docs, section)


def write_tables(
    path: Path | None, section: str, command: str, tables: "Sequence[Table]", data: str | None = None
) -> None:
    """Writes tables into a section of a Markdown file, where one is asked for."""
    if path is None:
        return
    from flows.bench.study_tables import write_section

    write_section(path, section, command, tables, f"Lengths: {data}." if data else "")
    tell(f"wrote {path}")


def print_tables(tables: "Sequence[Table]", data: str) -> None:
    """Prints tables, and where their lengths come from."""
    print_line(f"lengths: {data}")
    for table in tables:
        print_line("")
        print_table(*table)


def tell_paths(paths: Sequence[Path]) -> None:
    """Says which plots were drawn."""
    for path in paths:
        tell(f"drew {path}")
