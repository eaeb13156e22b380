"""Plots of the studies, as PNG and SVG."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blend_core.errors import ConfigurationError
from blend_core.planner import LENGTH_AWARE_POLICIES
from blend_core.studies.study import WorkloadRun, speedup
from flows.bench.policy import StepCosts
from flows.bench.ranks import NUM_RANKS, RanksRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")


def prepare_plots(folder: Path) -> None:
    """Makes the folder of plots if it is not there, so that a study of hours does not end without them.

    Raises:
        ConfigurationError: no file can be written there, or matplotlib is not installed.
    """
    _figure(1, 1)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"Plots cannot be written to {folder} ({error.strerror}); let --plots name a folder of yours."
        ) from None


def plot_timelines(runs: Sequence[WorkloadRun], folder: Path) -> list[Path]:
    """Draws how busy compute and memory were under each policy, one file pair per workload and set."""
    paths = []
    for run in runs:
        num_policies = len(run.timelines)
        figure = _figure(9, 2.1 * num_policies)
        rows = figure.subplots(num_policies, 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, line) in zip(rows, run.timelines.items(), strict=True):
            hours = [time_s / 3600 for time_s in line.time_s]
            axes.plot(hours, line.compute, label="compute", lw=1.2)
            axes.plot(hours, line.memory, label="memory", lw=1.2)
            axes.plot(hours, line.kv_usage, label="KV in use", lw=0.8, color="grey")
            axes.set_ylim(0, 1.02)
            axes.set_ylabel(name)
        handles, labels = rows[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
        rows[0].set_title(f"{run.name}, lengths {run.length_set}: share of peak per second of the run")
        rows[-1].set_xlabel("hours")
        paths += _save(figure, folder, f"timeline-{run.name}-{run.length_set}")
    return paths


def plot_sharing(runs: Sequence[WorkloadRun], folder: Path) -> list[Path]:
    """Draws the prefix sharing that each policy kept, as a share of what can be reached."""
    figure = _figure(9, 4)
    axes = figure.subplots()
    names = list(runs[0].policies)
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        axes.bar(
            [index + place * width for index in range(len(runs))],
            [run.policies[name].sharing_kept for run in runs],
            width,
            label=name,
        )
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(runs))])
    axes.set_xticklabels([f"{run.name}\n{run.length_set}" for run in runs], fontsize="small")
    axes.set_ylabel("sharing kept")
    axes.legend(ncols=len(names), fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15))
    return _save(figure, folder, "sharing")


def plot_grid(runs: Sequence[WorkloadRun], folder: Path) -> list[Path]:
    """Draws the speed-ups of the dual scan and of `density_matched` over `dfs`, on one scale of colours."""
    names = LENGTH_AWARE_POLICIES
    by_place = {_place(run): [speedup(run.policies, name, "dfs") for name in names] for run in runs}
    densities = sorted({density for density, _ in by_place})
    sharings = sorted({sharing for _, sharing in by_place})
    lowest, highest = (over(value for pair in by_place.values() for value in pair) for over in (min, max))
    unknown = [float("nan")] * len(names)
    figure = _figure(10, 7)
    rows = figure.subplots(len(names), 1, sharex=True)
    for index, (axes, name) in enumerate(zip(rows, names, strict=True)):
        cells = [
            [by_place.get((density, sharing), unknown)[index] for density in densities]
            for sharing in sharings
        ]
        image = axes.imshow(cells, origin="lower", aspect="auto", cmap="viridis", vmin=lowest, vmax=highest)
        axes.set_yticks(range(len(sharings)), [f"{sharing:.2f}" for sharing in sharings])
        for row, values in enumerate(cells):
            for column, value in enumerate(values):
                # White cannot be read on the light end of the scale.
                colour = "black" if value > lowest + 0.7 * (highest - lowest) else "white"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=7)
        axes.set_ylabel("prefix sharing")
        axes.set_title(f"{name} over dfs")
    rows[-1].set_xticks(range(len(densities)), [f"{density:.2f}" for density in densities])
    rows[-1].set_xlabel("compute density")
    figure.colorbar(image, ax=rows)
    return _save(figure, folder, "grid")


def plot_ranks(run: RanksRun, folder: Path) -> list[Path]:
    """Draws the speed-up of several ranks, a panel for each policy."""
    figure = _figure(10, 4.5)
    panels = figure.subplots(1, len(run.speedup), sharey=True, squeeze=False)[0]
    ranks = (1, *NUM_RANKS)
    for axes, (policy, by_trace) in zip(panels, run.speedup.items(), strict=True):
        axes.plot(ranks, ranks, color="grey", ls="--", lw=0.8, label="ideal")
        for name, by_ranks in by_trace.items():
            axes.plot(ranks, [1.0, *(by_ranks[number] for number in NUM_RANKS)], marker="o", label=name)
        axes.set_title(policy)
        axes.set_xlabel("ranks")
    panels[0].set_ylabel("speed-up over one rank")
    panels[0].legend()
    return _save(figure, folder, "ranks")


def plot_policy_costs(costs: Mapping[str, Mapping[int, StepCosts]], folder: Path) -> list[Path]:
    """Draws what each policy costs per step, mean and 99th percentile."""
    figure = _figure(10, 4.5)
    axes = figure.subplots()
    labels, means, tails = [], [], []
    for name, by_number in costs.items():
        for number, cost in by_number.items():
            labels.append(f"{name}\n{number:,}")
            means.append(cost.mean_s * 1e3)
            tails.append(cost.p99_s * 1e3)
    places = range(len(labels))
    axes.bar([place - 0.2 for place in places], means, 0.4, label="mean")
    axes.bar([place + 0.2 for place in places], tails, 0.4, label="99 %")
    axes.set_xticks(list(places), labels, fontsize="x-small", rotation=45, ha="right")
    axes.set_ylabel("ms per step")
    axes.legend()
    return _save(figure, folder, "policy")


def _place(run: WorkloadRun) -> tuple[float, float]:
    """Density and sharing that a workload of the grid was made for, as its name says."""
    _, density, _, sharing = run.name.split("-")
    return float(density), float(sharing)


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            "Plots need matplotlib; install it with: pip install 'blendserve[plot]'."
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: "Figure", folder: Path, name: str) -> list[Path]:
    paths = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
    for path in paths:
        figure.savefig(path, dpi=120)
    return paths
