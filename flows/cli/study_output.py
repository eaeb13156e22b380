"""What the studies of `blend bench` write: tables, sections of Markdown files, plots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.output import print_json, print_line, print_table, tell
from flows.cli.study_options import AskedTarget

if TYPE_CHECKING:
    from flows.bench.study_tables import Table


@dataclass(frozen=True, slots=True)
class StudySize:
    """How much a study simulates.

    Attributes:
        num_seeds: seeds that figures are the mean of.
        hours: practical optimum of each workload.
    """

    num_seeds: int
    hours: float


@dataclass(frozen=True, slots=True)
class Study:
    """A study that was asked for.

    Attributes:
        name: of the command, and of its section in a Markdown file.
        seeds: seeds that figures are the mean of.
        hours: practical optimum of each workload.
        asked: what is simulated.
        is_quick: in small.
    """

    name: str
    seeds: tuple[int, ...]
    hours: float
    asked: AskedTarget
    is_quick: bool

    @classmethod
    def of(
        cls,
        name: str,
        default: StudySize,
        first_seed: int,
        num_seeds: int | None,
        hours: float | None,
        asked: AskedTarget,
        *,
        is_quick: bool,
    ) -> "Study":
        """Returns the study of the size that the options say; `default` holds for those that are None."""
        count = default.num_seeds if num_seeds is None else num_seeds
        return cls(
            name,
            tuple(range(first_seed, first_seed + count)),
            default.hours if hours is None else hours,
            asked,
            is_quick,
        )

    @property
    def command(self) -> str:
        """What runs the study again."""
        return (
            f"blend bench {self.name}{' --quick' * self.is_quick} --hours {self.hours:g} "
            f"--seed {self.seeds[0]} --seeds {len(self.seeds)}{self.asked.options}"
        )

    @property
    def size_text(self) -> str:
        """How much of it there is, in a few words."""
        first, last = self.seeds[0], self.seeds[-1]
        seeds = f"seed {first}" if first == last else f"means over seeds {first} to {last}"
        return f"workloads of {self.hours:g} h, {seeds}"

    def as_json(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """What `--json` prints: what was simulated, and what it came to."""
        return {**self.asked.as_json(), "hours": self.hours, **figures}


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


def show_study(
    study: Study,
    tables: "Sequence[Table]",
    data: str,
    figures: Mapping[str, Any],
    *,
    docs: Path | None,
    json: bool,
) -> None:
    """Writes and prints what a study came to: its tables, or with `json` its figures.

    `data` says where lengths come from.
    """
    write_tables(docs, study.name, study.command, tables, data)
    if json:
        print_json(study.as_json(figures))
        return
    print_line(f"lengths: {data}; {study.asked.text}; {study.size_text}")
    for table in tables:
        print_line("")
        print_table(*table)


def tell_paths(paths: Sequence[Path]) -> None:
    """Says which plots were drawn."""
    for path in paths:
        tell(f"drew {path}")
