"""`blend bench policy | paper | grid | traces | ablation | ranks | simulate`: studies in simulation."""

from pathlib import Path
from typing import Annotated

import typer

from blend_core.wording import duration_text
from flows.cli.output import Json, print_json, print_line, print_table, tell
from flows.cli.study_options import (
    Device,
    Hours,
    Model,
    Plots,
    Quick,
    Seed,
    Seeds,
    TensorParallel,
    Traces,
    WriteDocs,
    asked_target,
    folder_of_traces,
)
from flows.cli.study_output import (
    Study,
    StudySize,
    prepare_outputs,
    show_study,
    tell_paths,
    write_tables,
)


def register(group: typer.Typer) -> None:
    """Adds the studies to `blend bench`."""
    for command in (policy, paper, grid, traces, ablation, ranks, simulate):
        group.command()(command)


def policy(
    seed: Seed = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps.")] = False,
    plots: Plots = None,
    write_docs: WriteDocs = None,
    json: Json = False,
) -> None:
    """Measure what each policy costs per step.

    A simulated engine has 1,000 and 10,000 requests in flight; only the calls to the policy are timed.

    \b
    Example:
      blend bench policy --json
    """
    from flows.bench.policy import NUM_STEPS, costs_json, run_policy_bench
    from flows.bench.study_plots import plot_policy_costs
    from flows.bench.study_tables import costs_table

    prepare_outputs(plots, write_docs, "policy")
    costs = run_policy_bench(seed, tell, num_steps=NUM_STEPS // 10 if quick else NUM_STEPS)
    if plots is not None:
        tell_paths(plot_policy_costs(costs, plots))
    command = f"blend bench policy{' --quick' * quick} --seed {seed}"
    write_tables(write_docs, "policy", command, [costs_table(costs)])
    if json:
        print_json(costs_json(costs))
    else:
        print_table(*costs_table(costs))


def paper(
    traces: Traces = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    hours: Hours = None,
    model: Model = None,
    device: Device = None,
    tensor_parallel: TensorParallel = None,
    quick: Quick = False,
    plots: Plots = None,
    write_docs: WriteDocs = None,
    json: Json = False,
) -> None:
    """Compare policies on the paper's four traces.

    Each is simulated with preset and with hidden video lengths, 5 hours and 5 seeds by default.

    \b
    Examples:
      blend bench paper --quick
      blend bench paper --hours 1 --seeds 2 --plots plots --json
    """
    from flows.bench.paper import QUICK_HOURS, run_paper_bench
    from flows.bench.study_plots import plot_sharing, plot_timelines
    from flows.bench.study_tables import comparison_table, interleaved_table

    prepare_outputs(plots, write_docs, "paper")
    asked = asked_target(model, device, tensor_parallel)
    size = StudySize(1, QUICK_HOURS) if quick else StudySize(5, 5.0)
    study = Study.of("paper", size, seed, seeds, hours, asked, is_quick=quick)
    run = run_paper_bench(folder_of_traces(traces), study.seeds, study.hours, tell, asked.target)
    tables = [comparison_table(run.study.workloads), interleaved_table(run)]
    if plots is not None:
        tell_paths(plot_timelines(run.study.workloads, plots) + plot_sharing(run.study.workloads, plots))
    show_study(study, tables, run.study.data, run.study.as_json(), docs=write_docs, json=json)


def grid(
    traces: Traces = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    hours: Hours = None,
    model: Model = None,
    device: Device = None,
    tensor_parallel: TensorParallel = None,
    summary: Annotated[bool, typer.Option("--summary", help="Only what the grid comes to.")] = False,
    quick: Quick = False,
    plots: Plots = None,
    write_docs: WriteDocs = None,
    json: Json = False,
) -> None:
    """Compare policies on the paper's grid of 65 workloads.

    Densities 0.80 to 1.40 and prefix sharing 0.05 to 0.45; 1 hour and one seed by default.

    \b
    Example:
      blend bench grid --summary
    """
    from flows.bench.grid import QUICK_HOURS, QUICK_STRIDE, grid_summary, run_grid_bench
    from flows.bench.study_plots import plot_grid
    from flows.bench.study_tables import comparison_table, grid_table

    prepare_outputs(plots, write_docs, "grid")
    asked = asked_target(model, device, tensor_parallel)
    size = StudySize(1, QUICK_HOURS) if quick else StudySize(1, 1.0)
    study = Study.of("grid", size, seed, seeds, hours, asked, is_quick=quick)
    run = run_grid_bench(
        folder_of_traces(traces),
        study.seeds,
        study.hours,
        tell,
        asked.target,
        stride=QUICK_STRIDE if quick else 1,
    )
    if plots is not None:
        tell_paths(plot_grid(run.workloads, plots))
    tables = [grid_table(run)] if summary else [grid_table(run), comparison_table(run.workloads)]
    show_study(
        study, tables, run.data, grid_summary(run) if summary else run.as_json(), docs=write_docs, json=json
    )


def traces(
    traces: Traces = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    hours: Hours = None,
    model: Model = None,
    device: Device = None,
    tensor_parallel: TensorParallel = None,
    quick: Quick = False,
    plots: Plots = None,
    write_docs: WriteDocs = None,
    json: Json = False,
) -> None:
    """Compare policies on mixes of published traces.

    Six mixes of density 1.0 with hidden lengths; 1 hour and 3 seeds by default. Without the traces five, of
    generated lengths.

    \b
    Example:
      blend bench traces --traces ../shared/traces --json
    """
    from flows.bench.study_plots import plot_sharing, plot_timelines
    from flows.bench.study_tables import comparison_table
    from flows.bench.traces import QUICK_HOURS, run_traces_bench

    prepare_outputs(plots, write_docs, "traces")
    asked = asked_target(model, device, tensor_parallel)
    size = StudySize(1, QUICK_HOURS) if quick else StudySize(3, 1.0)
    study = Study.of("traces", size, seed, seeds, hours, asked, is_quick=quick)
    run = run_traces_bench(folder_of_traces(traces), study.seeds, study.hours, tell, asked.target)
    tables = [comparison_table(run.workloads)]
    if plots is not None:
        tell_paths(plot_timelines(run.workloads, plots) + plot_sharing(run.workloads, plots))
    show_study(study, tables, run.data, run.as_json(), docs=write_docs, json=json)


def ablation(
    traces: Traces = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    hours: Hours = None,
    model: Model = None,
    device: Device = None,
    tensor_parallel: TensorParallel = None,
    quick: Quick = False,
    write_docs: WriteDocs = None,
    json: Json = False,
) -> None:
    """Leave out each idea of density_matched, or try one alone.

    The paper's four traces, preset and hidden, 1 hour and 5 seeds by default; `--hours 5` takes hours.

    \b
    Example:
      blend bench ablation --seeds 2
    """
    from flows.bench.ablation import QUICK_HOURS, run_ablation_bench
    from flows.bench.study_tables import ablation_table, ends_table

    prepare_outputs(None, write_docs, "ablation")
    asked = asked_target(model, device, tensor_parallel)
    size = StudySize(1, QUICK_HOURS) if quick else StudySize(5, 1.0)
    study = Study.of("ablation", size, seed, seeds, hours, asked, is_quick=quick)
    run = run_ablation_bench(folder_of_traces(traces), study.seeds, study.hours, tell, asked.target)
    tables = [ablation_table(run), ends_table(run)]
    show_study(study, tables, run.data, run.as_json(), docs=write_docs, json=json)


def ranks(
    traces: Traces = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    hours: Hours = None,
    model: Model = None,
    device: Device = None,
    tensor_parallel: TensorParallel = None,
    quick: Quick = False,
    plots: Plots = None,
    write_docs: WriteDocs = None,
    json: Json = False,
) -> None:
    """Measure how much faster several ranks are than one.

    The paper's four traces, preset lengths, on 2, 4 and 8 ranks; 5 hours and one seed by default.

    \b
    Example:
      blend bench ranks --hours 2
    """
    from flows.bench.ranks import QUICK_HOURS, run_ranks_bench
    from flows.bench.study_plots import plot_ranks
    from flows.bench.study_tables import ranks_table

    prepare_outputs(plots, write_docs, "ranks")
    asked = asked_target(model, device, tensor_parallel)
    size = StudySize(1, QUICK_HOURS) if quick else StudySize(1, 5.0)
    study = Study.of("ranks", size, seed, seeds, hours, asked, is_quick=quick)
    run = run_ranks_bench(folder_of_traces(traces), study.seeds, study.hours, tell, asked.target)
    if plots is not None:
        tell_paths(plot_ranks(run, plots))
    show_study(study, [ranks_table(run)], run.data, run.as_json(), docs=write_docs, json=json)


def simulate(
    file: Annotated[Path, typer.Argument(metavar="FILE.parquet", help="A workload, a row per request.")],
    seed: Seed = 0,
    model: Model = None,
    device: Device = None,
    tensor_parallel: TensorParallel = None,
    plots: Plots = None,
    json: Json = False,
) -> None:
    """Compare policies on a workload of your own.

    Columns: num_prompt_tokens, num_output_tokens, prefix_path (a list of segment id and tokens), preset
    (whether the output length is known beforehand).

    \b
    Example:
      blend bench simulate tonight.parquet --json
    """
    from flows.bench.simulate import run_simulate_bench
    from flows.bench.study_plots import plot_timelines
    from flows.bench.study_tables import policy_table
    from flows.bench.study_tasks import workload_json

    prepare_outputs(plots, None, "simulate")
    asked = asked_target(model, device, tensor_parallel)
    run = run_simulate_bench(file, seed, tell, asked.target)
    if plots is not None:
        tell_paths(plot_timelines([run], plots))
    if json:
        print_json({**asked.as_json(), **workload_json(run)})
    else:
        print_line(
            f"{run.name}: density {run.density:.2f}, optimum {duration_text(run.optimum_s)}; {asked.text}"
        )
        print_table(*policy_table(run))
