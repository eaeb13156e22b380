"""Density per batch, merged rows, and the what-if on another device."""

import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from blend_core.errors import ConfigurationError
from blend_core.performance import step_cost
from blend_core.specs import load_device_profile, model_spec_preset
from flows.report import JobReport, batch_densities, merged
from flows.report_format import density_plot, density_rows, report_markdown, report_text
from storage.results import Counts, DensityRow, JobMetrics

START = datetime(2026, 1, 1, tzinfo=UTC)
MODEL = model_spec_preset("llama-3.1-8b")
A100 = load_device_profile("a100-80g")


def row(index: int, *, compute_s: float = 2.0, memory_s: float = 1.0, duration_s: float = 1.0) -> DensityRow:
    return DensityRow(
        rank=0,
        batch_index=index,
        revision=0,
        started_at=START + timedelta(seconds=index),
        duration_s=duration_s,
        predicted_s=1.0,
        num_steps=4,
        num_prefill_tokens=100,
        num_decode_tokens=20,
        num_cached_tokens=50,
        num_recomputed_tokens=0,
        prefill_tokens_sq=10_000,
        decode_kv_tokens=4_000,
        compute_s=compute_s,
        memory_s=memory_s,
        planned_density=1.5,
        measured_density=None if memory_s == 0 else compute_s / memory_s,
        kv_usage=0.5,
        num_running_left=2.0,
        num_running_right=1.0,
        num_preempted=1,
        num_finished=3,
    )


def report(windows: list[DensityRow]) -> JobReport:
    return JobReport(
        job_id="job_1",
        name="night",
        status="completed",
        model="m",
        engine="vllm",
        policy="dual_scan",
        device="cpu",
        what_if_device="a100-80g",
        counts=Counts(total=7, succeeded=5, errored=2, expired=0, cancelled=0),
        metrics=JobMetrics(
            num_prompt_tokens=300,
            num_cached_tokens=100,
            num_output_tokens=60,
            num_batches=len(windows),
            busy_s=3.0,
            tokens_per_s=120.0,
            output_tokens_per_s=20.0,
            prefix_sharing=1 / 3,
            compute_s=6.0,
            memory_s=3.0,
            num_preempted=0,
        ),
        planned_sharing=0.35,
        best_sharing=0.4,
        error_codes={"invalid_json": 2},
        batches=batch_densities(windows, MODEL, A100),
    )


def test_the_what_if_is_the_same_work_on_the_other_device() -> None:
    batch = batch_densities([row(0)], MODEL, A100)[0]
    expected = step_cost(MODEL, A100, 120, 10_000, 4_000)
    assert batch.what_if_density == pytest.approx(expected.density)
    assert batch.density == pytest.approx(2.0)


def test_batches_of_several_ranks_are_numbered_together() -> None:
    windows = [replace(row(index // 2), rank=index % 2) for index in range(30)]
    shown = [str(cells[0]) for cells in density_rows(report(windows))]
    assert (shown[0], shown[-1], len(shown)) == ("0-1", "28-29", 12)


def test_the_time_of_the_whole_job_stands_beside_that_of_its_engine() -> None:
    ended = replace(report([row(0)]), took_s=98.2)
    told = "1 min 38 s from submission to end; the engine worked in 3.0 s of it"
    assert f"time             {told}\n" in report_text(ended)
    assert told in report_markdown(ended)
    assert ended.as_json()["took_s"] == 98.2
    assert "from submission" not in report_text(report([row(0)]))


def test_without_a_model_there_is_no_what_if() -> None:
    assert batch_densities([row(0)], None, A100)[0].what_if_density is None


def test_a_batch_without_kv_reading_has_no_density() -> None:
    assert batch_densities([row(0, memory_s=0.0)], MODEL, A100)[0].density is None


def test_many_windows_become_a_dozen_rows_and_lose_nothing() -> None:
    batches = batch_densities([row(index) for index in range(31)], MODEL, A100)
    rows = merged(batches, 12)
    assert len(rows) == 12
    assert [rows[0].first_batch, rows[-1].last_batch] == [0, 30]
    assert all(left.last_batch + 1 == right.first_batch for left, right in pairwise(rows))
    assert sum(group.num_decode_tokens for group in rows) == 31 * 20
    assert sum(group.num_preempted for group in rows) == 31


def test_density_of_merged_windows_is_the_ratio_of_sums() -> None:
    batches = batch_densities([row(0, compute_s=9, memory_s=1), row(1, compute_s=1, memory_s=4)], MODEL, A100)
    assert merged(batches, 1)[0].density == pytest.approx(10 / 5)


def test_means_are_weighed_by_duration() -> None:
    quiet, busy = row(0, duration_s=3.0), row(1, duration_s=1.0)
    group = merged(batch_densities([quiet, busy], MODEL, A100), 1)[0]
    assert group.num_running_left == pytest.approx(2.0)
    assert group.duration_s == pytest.approx(4.0)


def test_the_text_reconciles_counts_and_names_both_devices() -> None:
    text = report_text(report([row(0), row(1)]))
    assert "5 succeeded + 2 errored + 0 expired + 0 cancelled = 7" in text
    assert "planned 35.0%, measured 33.3%, best 40.0%" in text
    assert "on cpu" in text
    assert "on a100-80g" in text
    assert "invalid_json" in text


def test_the_report_names_engine_and_policy_of_the_run() -> None:
    ran = report([row(0)])
    for text in (report_text(ran), report_markdown(ran)):
        assert "job_1 (night), completed, model m, engine vllm, policy dual_scan" in text
    assert (ran.as_json()["engine"], ran.as_json()["policy"]) == ("vllm", "dual_scan")
    assert "engine" not in report_text(replace(ran, engine=None, policy=None))


def test_a_job_that_has_not_run_has_a_report_too() -> None:
    text = report_text(report([]))
    assert "on cpu" not in text
    assert "## Job job_1" in report_markdown(report([]))


def test_the_markdown_report_says_where_the_answers_are() -> None:
    text = report_markdown(replace(report([row(0)]), output_uri="s3://blend/jobs/job_1/output.jsonl"))

    assert "- answers: `s3://blend/jobs/job_1/output.jsonl`" in text
    assert "error rows: `" not in text
    assert "as a table" not in text
    assert "FROM request_result WHERE job_id = 'job_1'" in text


def test_a_job_that_wrote_only_a_table_names_it() -> None:
    text = report_markdown(replace(report([row(0)]), table_uri="s3://blend/jobs/job_1/results.parquet"))

    assert "- all requests, as a table: `s3://blend/jobs/job_1/results.parquet`" in text
    assert "- answers: `" not in text


def test_json_has_one_entry_per_window() -> None:
    plain = report([row(0), row(1)]).as_json()
    assert [batch["first_batch"] for batch in plain["batches"]] == [0, 1]
    assert plain["what_if"]["device"] == "a100-80g"
    assert plain["pending"] == 0


def test_a_table_row_fits_its_headers() -> None:
    one = report([row(0)])
    assert len({len(cells) for cells in density_rows(one)}) == 1


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_drawn_in_the_named_format(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"density.{suffix}"
    density_plot(report([row(0), row(1, memory_s=0.0), row(2)]), path)
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"svg" in io.BytesIO(start).read()


def test_a_plot_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="png"):
        density_plot(report([row(0)]), tmp_path / "density.gif")


def test_a_plot_into_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigurationError, match="cannot be written to"):
        density_plot(report([row(0)]), tmp_path / "gone" / "density.svg")


def test_a_failed_job_tells_why() -> None:
    text = report_text(replace(report([]), failure="The model is not there."))
    assert "The model is not there." in text


def test_a_table_that_was_not_written_is_told_everywhere() -> None:
    told = replace(report([]), write_back_error="shop.answer cannot be written (refused).")
    for text in (report_text(told), report_markdown(told)):
        assert "shop.answer cannot be written (refused). `blend write-back job_1` does it again" in text
    assert told.as_json()["write_back_error"] == "shop.answer cannot be written (refused)."
    assert "not written back" not in report_text(report([]))
