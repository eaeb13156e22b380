"""Tables of the studies, for terminals and for `docs/studies.md`."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np

from blend_core.errors import ConfigurationError
from blend_core.studies.study import WorkloadRun, speedup
from blend_core.wording import seconds_text
from flows.bench.ablation import AblationRun
from flows.bench.grid import GRID_RATIOS, grid_summary
from flows.bench.paper import PaperRun
from flows.bench.policy import StepCosts
from flows.bench.ranks import NUM_RANKS, RanksRun
from flows.bench.study_tasks import StudyRun
from flows.tables import markdown_table

COMPARED: Final = ("dfs", "random", "dual_scan", "density_matched")
"""Policies on the overlap engine, in the order of a table's rows."""

Table = tuple[Sequence[str], list[tuple[object, ...]]]


def comparison_table(runs: Sequence[WorkloadRun]) -> Table:
    """Duration of the yardstick and how the policies compare, a row per workload, and their means."""
    headers = (
        "workload",
        "set",
        "density",
        "sharing",
        "requests",
        "optimum, s",
        "policy",
        "duration, s",
        "over dfs",
        "over dfs_sequential",
        "of optimum",
        "sharing kept",
        "preempted",
    )
    rows: list[tuple[object, ...]] = []
    for run in runs:
        first: tuple[object, ...] = (
            run.name,
            run.length_set,
            run.density,
            f"{run.prefix_sharing:.0%}",
            round(run.num_requests),
            round(run.optimum_s),
        )
        for name in COMPARED:
            policy = run.policies[name]
            figures = (
                f"{speedup(run.policies, name, 'dfs'):.3f}",
                f"{speedup(run.policies, name, 'dfs_sequential'):.3f}",
                f"{policy.fraction_of_optimum:.3f}",
                f"{policy.sharing_kept:.3f}",
                round(policy.num_preempted),
            )
            rows.append((*first, name, round(policy.duration_s), *figures))
            first = (None,) * 6
    for length_set in dict.fromkeys(run.length_set for run in runs):
        own = [run for run in runs if run.length_set == length_set]
        for name in COMPARED:
            for label, over in (("mean", np.mean), ("worst", np.min)):
                rows.append((label, length_set, *(None,) * 4, name, None, *_over_all(own, name, over), None))
    return headers, rows


def _over_all(
    runs: Sequence[WorkloadRun], name: str, over: Callable[[list[float]], float]
) -> tuple[str, ...]:
    """A policy's ratios over workloads."""
    policies = [run.policies[name] for run in runs]
    columns = (
        [speedup(run.policies, name, "dfs") for run in runs],
        [speedup(run.policies, name, "dfs_sequential") for run in runs],
        [policy.fraction_of_optimum for policy in policies],
        [policy.sharing_kept for policy in policies],
    )
    return tuple(f"{over(column):.3f}" for column in columns)


def interleaved_table(run: PaperRun) -> Table:
    """How `dfs` does where prompts of one kind do not lie together."""
    rows: list[tuple[object, ...]] = []
    for mixed, preset in run.interleaved:
        dfs_s, own = mixed.policies["dfs"].duration_s, preset.policies
        rows.append(
            (
                mixed.name,
                f"{own['dfs'].duration_s / dfs_s:.3f}",
                f"{dfs_s / own['dual_scan'].duration_s:.3f}",
            )
        )
    return ("workload, first seed", "interleaved dfs over dfs", "dual_scan over interleaved dfs"), rows


def policy_table(run: WorkloadRun) -> Table:
    """Every policy of one workload."""
    headers = (
        "policy",
        "duration, s",
        "over dfs",
        "of optimum",
        "sharing kept",
        "steps",
        "preempted",
        "compute, s",
        "memory, s",
    )
    return headers, [
        (
            name,
            seconds_text(policy.duration_s),
            f"{speedup(run.policies, name, 'dfs'):.3f}",
            f"{policy.fraction_of_optimum:.3f}",
            f"{policy.sharing_kept:.3f}",
            round(policy.num_steps),
            round(policy.num_preempted),
            seconds_text(policy.compute_s),
            seconds_text(policy.memory_s),
        )
        for name, policy in run.policies.items()
    ]


def grid_table(study: StudyRun) -> Table:
    """What the grid comes to."""
    summary = grid_summary(study)
    rows: list[tuple[object, ...]] = [
        (key.replace("_over_", " over "), *(f"{summary[key][name]:.3f}" for name in ("min", "mean", "max")))
        for key in GRID_RATIOS
    ]
    return ("speed-up", "min", "mean", "max"), rows


def ablation_table(run: AblationRun) -> Table:
    """Share of the practical optimum, by variant."""
    rows: list[tuple[object, ...]] = [
        (name, *(f"{figure:.3f}" for length_set in ("preset", "hidden") for figure in by_set[length_set]))
        for name, by_set in run.fractions.items()
    ]
    return ("variant", "preset, mean", "preset, worst", "hidden, mean", "hidden, worst"), rows


def ends_table(run: AblationRun) -> Table:
    """Seconds of both ends of a run, beside the least that its start takes."""
    rows: list[tuple[object, ...]] = [
        (
            name,
            *(
                f"{seconds:,.0f}"
                for length_set in ("preset", "hidden")
                for seconds in (by_set[length_set].start_s, by_set[length_set].end_s)
            ),
        )
        for name, by_set in run.ends.items()
    ]
    least = f"{run.least_start_s:,.0f}"
    rows.append(("no run takes less", least, "0", least, "0"))
    return ("policy", "preset: start, s", "end, s", "hidden: start, s", "end, s"), rows


def ranks_table(run: RanksRun) -> Table:
    """Speed-ups by number of ranks."""
    rows: list[tuple[object, ...]] = [
        (name, policy, *(f"{by_ranks[number]:.3f}" for number in NUM_RANKS))
        for policy, by_trace in run.speedup.items()
        for name, by_ranks in by_trace.items()
    ]
    return ("workload", "policy", *(f"{number} ranks" for number in NUM_RANKS)), rows


def costs_table(costs: Mapping[str, Mapping[int, StepCosts]]) -> Table:
    """Milliseconds of a policy per step."""
    rows: list[tuple[object, ...]] = [
        (name, number, *(f"{seconds * 1e3:.3f}" for seconds in (cost.mean_s, cost.p99_s, cost.max_s)))
        for name, by_number in costs.items()
        for number, cost in by_number.items()
    ]
    return ("policy", "in flight", "mean, ms", "99 %, ms", "maximum, ms"), rows


def section_of(path: Path, section: str) -> tuple[str, str, str, str]:
    """Returns a Markdown file in four: what is before a section, its two marks, and what is behind it.

    Raises:
        ConfigurationError: the file cannot be written, or does not have the marks.
    """
    begins, ends = f"<!-- {section} begins -->", f"<!-- {section} ends -->"
    try:
        with path.open("r+", encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} is no text file that can be written ({type(error).__name__}); let --write-docs name a "
            f"Markdown file with the lines {begins} and {ends}."
        ) from None
    before, begun, rest = text.partition(begins)
    _, ended, after = rest.partition(ends)
    if not begun or not ended:
        raise ConfigurationError(
            f"{path} has no lines {begins} and {ends}; put them where the tables belong."
        )
    return before, begins, ends, after


def write_section(path: Path, section: str, command: str, tables: Sequence[Table], note: str = "") -> None:
    """Writes tables between the marks of a section of a Markdown file, with date and hardware.

    Raises:
        ConfigurationError: as `section_of`.
    """
    before, begins, ends, after = section_of(path, section)
    origin = (
        f"Measured by `{command}` on {datetime.now(UTC):%Y-%m-%d} on "
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}."
    )
    parts = [begins, origin, *([note] if note else []), *(markdown_table(*table) for table in tables), ends]
    path.write_text(before + "\n\n".join(parts) + after, encoding="utf-8")
