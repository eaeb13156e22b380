"""What the study commands compute and print, on workloads of minutes."""

import json
import os
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from blend_core.errors import ConfigurationError, PlanError
from blend_core.planner import LENGTH_AWARE_POLICIES
from blend_core.studies.mixes import build_workload, paper_mix
from blend_core.studies.study import STUDY_POLICIES
from blend_core.studies.trace_lengths import gsm8k
from flows.bench.grid import GridTask, grid_summary, run_grid_task
from flows.bench.paper import PaperRun, PaperTask, run_paper_task
from flows.bench.policy import costs_json, measure_policy
from flows.bench.ranks import NUM_RANKS, RanksRun, RanksTask, run_ranks_task
from flows.bench.study_plots import plot_grid, plot_ranks, plot_sharing, plot_timelines
from flows.bench.study_tables import comparison_table, interleaved_table, ranks_table, write_section
from flows.bench.study_tasks import StudyRun, interleaved, over_seeds, run_tasks, study_target
from flows.cli.app import app
from flows.cli.study_options import folder_of_traces

HOURS = 0.05
POLICY_KEYS = {
    "duration_s",
    "fraction_of_optimum",
    "sharing_kept",
    "num_steps",
    "num_preempted",
    "compute_s",
    "memory_s",
}
WORKLOAD_KEYS = {"name", "set", "density", "prefix_sharing", "num_requests", "optimum_s", "policies"}


@pytest.fixture(scope="module")
def paper_run():
    preset, hidden, mixed = run_paper_task(
        PaperTask(trace=0, seed=0, hours=HOURS, traces=None, interleaves=True, target=study_target())
    )
    study = StudyRun("generated", HOURS, (0,), (preset, hidden))
    return PaperRun(study, ((mixed, preset),))


def test_a_study_prints_what_is_promised(paper_run):
    printed = json.loads(json.dumps(paper_run.study.as_json()))
    assert set(printed) == {"data", "seeds", "workloads"}
    assert (printed["data"], printed["seeds"]) == ("generated", [0])
    assert [workload["set"] for workload in printed["workloads"]] == ["preset", "hidden"]
    for workload in printed["workloads"]:
        assert set(workload) == WORKLOAD_KEYS
        assert list(workload["policies"]) == list(STUDY_POLICIES)
        assert all(set(policy) == POLICY_KEYS for policy in workload["policies"].values())


def test_both_sets_are_the_same_requests(paper_run):
    preset, hidden = paper_run.study.workloads
    assert (preset.num_requests, preset.optimum_s) == (hidden.num_requests, hidden.optimum_s)
    assert preset.policies["dfs"] == hidden.policies["dfs"]
    assert preset.policies["dual_scan"] != hidden.policies["dual_scan"]


def test_interleaving_keeps_the_sharing_and_changes_the_order():
    workload = build_workload(paper_mix(None, "trace-1", 1.4, 0.35), study_target().setting(HOURS), 0)
    mixed = interleaved(workload, 1)
    mixed.requests.check_integrity()
    assert (mixed.num_output_tokens == workload.num_output_tokens).all()
    assert (mixed.requests.segment_tokens == workload.requests.segment_tokens).all()
    assert (mixed.requests.lexical_order() != workload.requests.lexical_order()).any()


def test_seeds_are_averaged_by_workload_and_set(paper_run):
    preset, hidden = paper_run.study.workloads
    slower = replace(preset, optimum_s=preset.optimum_s + 2)
    merged = over_seeds([preset, hidden, slower])
    assert [run.length_set for run in merged] == ["preset", "hidden"]
    assert merged[0].optimum_s == pytest.approx(preset.optimum_s + 1)


def test_tasks_run_in_other_processes_and_come_back_in_order():
    told = []
    assert run_tasks(str.upper, ["a", "b", "c"], lambda text: told.append(text.split(":")[0]), repr) == [
        "A",
        "B",
        "C",
    ]
    assert sorted(told) == ["1 of 3", "2 of 3", "3 of 3"]


def test_a_task_that_runs_alone_is_told_of_as_well():
    told = []
    assert run_tasks(str.upper, ["a"], told.append, repr) == ["A"]
    assert told == ["1 of 1: 'a'"]


@pytest.mark.skipif(os.cpu_count() == 1, reason="on one core tasks have no process of their own")
def test_a_process_that_is_ended_from_outside_is_an_error_of_the_study():
    with pytest.raises(PlanError, match="ended from outside"):
        run_tasks(os._exit, [1, 1], lambda text: None, repr)


@pytest.mark.skipif(os.cpu_count() == 1, reason="on one core tasks have no process of their own")
def test_a_task_that_fails_ends_the_study_before_the_others_begin(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    begin = time.monotonic()
    with pytest.raises(ValueError, match="non-negative"):
        run_tasks(time.sleep, [-1.0, *[0.5] * 120], lambda text: None, repr)
    assert time.monotonic() - begin < 20, "all of them would take 30 s"


def test_the_grid_is_summed_up():
    run = run_grid_task(GridTask(("density-1.00-sharing-0.25", 1.0, 0.25), 0, HOURS, None, study_target()))
    summary = grid_summary(StudyRun("generated", HOURS, (0,), (run,)))
    ratio = run.policies["dfs"].duration_s / run.policies["dual_scan"].duration_s
    assert summary["dual_scan_over_dfs"] == {"min": ratio, "mean": ratio, "max": ratio}


def test_more_ranks_are_faster():
    of_policy = {
        policy: run_ranks_task(RanksTask(0, policy, 0, HOURS, None, study_target()))
        for policy in LENGTH_AWARE_POLICIES
    }
    for speedups in of_policy.values():
        assert tuple(speedups) == NUM_RANKS
        assert 1 < speedups[2] <= 2.1
    run = RanksRun(
        "generated", HOURS, (0,), {policy: {"trace-1": speedups} for policy, speedups in of_policy.items()}
    )
    texts = {
        policy: {str(number): value for number, value in speedups.items()}
        for policy, speedups in of_policy.items()
    }
    assert run.as_json()["workloads"] == [
        {
            "name": "trace-1",
            "speedup": texts["dual_scan"],
            "density_matched": {"speedup": texts["density_matched"]},
        }
    ]
    assert [row[:2] for row in ranks_table(run)[1]] == [
        ("trace-1", policy) for policy in LENGTH_AWARE_POLICIES
    ]


@pytest.mark.parametrize(
    ("name", "is_hidden"),
    [("dfs", False), ("dual_scan", False), ("density_matched", False), ("density_matched", True)],
)
def test_the_cost_of_a_policy_is_measured_over_full_steps(name, is_hidden):
    cost = measure_policy(name, 200, 100, 0, is_hidden=is_hidden)
    assert 0 < cost.mean_s <= cost.max_s
    assert cost.p99_s <= cost.max_s
    assert set(costs_json({name: {200: cost}})["policies"][name]["200"]) == {"mean_s", "p99_s", "max_s"}


def test_plots_are_drawn_as_png_and_svg(paper_run, tmp_path):
    runs = paper_run.study.workloads
    grid = [
        replace(runs[0], name=f"density-{d}-sharing-{s}") for d in ("0.80", "0.85") for s in ("0.05", "0.15")
    ]
    ranks = RanksRun(
        "generated",
        HOURS,
        (0,),
        {policy: {"trace-1": {2: 1.9, 4: 3.8, 8: 7.5}} for policy in LENGTH_AWARE_POLICIES},
    )
    paths = [
        *plot_timelines(runs, tmp_path),
        *plot_sharing(runs, tmp_path),
        *plot_grid(grid, tmp_path),
        *plot_ranks(ranks, tmp_path),
    ]
    assert {path.suffix for path in paths} == {".png", ".svg"}
    assert all(path.stat().st_size > 5_000 for path in paths)


def test_tables_go_between_the_marks_of_their_section(paper_run, tmp_path):
    docs = tmp_path / "studies.md"
    docs.write_text("# Studies\n\n<!-- paper begins -->\nold\n<!-- paper ends -->\n\nAfter.\n")
    tables = [comparison_table(paper_run.study.workloads), interleaved_table(paper_run)]
    write_section(docs, "paper", "blend bench paper", tables)
    text = docs.read_text()
    assert text.startswith("# Studies\n")
    assert text.endswith("After.\n")
    assert "old" not in text
    assert "| trace-1 | preset |" in text
    assert "Measured by `blend bench paper`" in text
    with pytest.raises(ConfigurationError, match="grid begins"):
        write_section(docs, "grid", "blend bench grid", tables)


def test_a_workload_of_ones_own_is_simulated(tmp_path, make_workload):
    workload = make_workload(num_chat=30, num_long=5, num_shared=50)
    requests = workload.requests
    paths = [
        [
            [int(requests.segment_ids[at]), int(requests.segment_tokens[at])]
            for at in range(requests.offsets[row], requests.offsets[row + 1])
        ]
        for row in range(len(requests))
    ]
    table = pa.table(
        {
            "num_prompt_tokens": requests.num_prompt_tokens,
            "num_output_tokens": workload.num_output_tokens,
            "prefix_path": paths,
            "preset": requests.min_tokens == requests.max_tokens,
        }
    )
    pq.write_table(table, tmp_path / "tonight.parquet")
    result = CliRunner().invoke(app, ["bench", "simulate", str(tmp_path / "tonight.parquet"), "--json"])
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert set(printed) == {*WORKLOAD_KEYS, "model", "device", "tensor_parallel"}
    assert printed["name"] == "tonight"
    assert printed["num_requests"] == 85


def test_a_folder_of_traces_that_is_named_and_missing_is_told(tmp_path):
    with pytest.raises(ConfigurationError, match="none; name the one of the traces by --traces"):
        folder_of_traces(tmp_path / "none")


def test_without_a_folder_of_traces_lengths_are_generated_and_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("BLEND_TRACES", str(tmp_path / "none"))
    result = CliRunner().invoke(app, ["bench", "traces", "--hours", "0.05", "--seeds", "1", "--json"])
    assert result.exit_code == 0
    assert "lengths are generated" in result.stderr
    printed = json.loads(result.stdout)
    assert printed["data"] == "generated"
    assert len(printed["workloads"]) == 5


def test_a_folder_that_lacks_a_trace_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigurationError, match=r"no azure_llm_2023\.parquet"):
        paper_mix(tmp_path, "trace-1", 1.4, 0.35)
    with pytest.raises(ConfigurationError, match=r"gsm8k_cot_lengths\.csv\.gz"):
        gsm8k(tmp_path)
