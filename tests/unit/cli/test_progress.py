"""What a running job shows."""

import io
import os
from contextlib import suppress

import pytest
from rich.console import Console

from blend_core.engines.base import StepWindow
from flows.progress import BatchRates, LineProgress, LiveProgress, balance_bar, shown_progress


def window(**values: float) -> StepWindow:
    fields: dict[str, float] = dict.fromkeys(
        [
            "batch_index",
            "revision",
            "started_at",
            "predicted_s",
            "num_recomputed_tokens",
            "prefill_tokens_sq",
            "decode_kv_tokens",
            "num_preempted",
            "num_finished",
        ],
        0,
    )
    fields |= {
        "duration_s": 1.0,
        "num_steps": 1,
        "num_prefill_tokens": 60,
        "num_decode_tokens": 10,
        "num_cached_tokens": 30,
        "compute_s": 2.0,
        "memory_s": 1.0,
        "kv_usage": 0.5,
        "num_running_left": 3,
        "num_running_right": 1,
    }
    return StepWindow(**(fields | values))  # type: ignore[arg-type]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_cached_tokens_count_for_speed_and_for_sharing() -> None:
    rates = BatchRates()
    rates.add(window(), 0)
    rates.add(window(duration_s=3.0), 0)
    assert rates.tokens_per_s == pytest.approx(200 / 4)
    assert rates.prefix_sharing == pytest.approx(60 / 180)


def test_recomputed_tokens_do_not_lower_sharing() -> None:
    rates = BatchRates()
    rates.add(window(num_prefill_tokens=90, num_recomputed_tokens=30), 0)
    assert rates.prefix_sharing == pytest.approx(30 / 90)


def test_plain_lines_come_at_most_once_per_interval() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = LineProgress(stream, clock, interval_s=5)
    progress.stage_started("infer", "runs m")
    for second in range(11):
        clock.now = second
        progress.counted(second, 100)
    assert [line for line in stream.getvalue().splitlines() if " of " in line] == [
        "infer: 5 of 100",
        "infer: 10 of 100",
    ]


def test_lines_that_nobody_reads_any_more_stop_nothing() -> None:
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    stream = os.fdopen(writing_end, "w")
    try:
        progress = LineProgress(stream, lambda: 0.0)
        progress.stage_started("infer", "runs tiny")
        progress.note("The engine is started again.")
    finally:
        # What could not be written is still there, and cannot be written now.
        with suppress(BrokenPipeError):
            stream.close()


def test_a_line_of_the_infer_stage_tells_rates() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = LineProgress(stream, clock, interval_s=0)
    progress.stage_started("infer", "runs m")
    progress.window(window(), 0)
    progress.counted(1, None)
    assert "100 tokens/s, sharing 33%, density 2.00, running 3 left + 1 right" in stream.getvalue()


def test_the_live_display_shows_stages_count_and_balance() -> None:
    clock = Clock()
    console = Console(file=io.StringIO(), width=120, color_system=None)
    live = LiveProgress(console, clock)
    live.stage_started("ingest", "reads")
    clock.now = 2.0
    live.stage_finished("ingest", "10 requests")
    live.stage_started("infer", "runs m")
    live.counted(4, 10)
    live.window(window(), 0)
    with console.capture() as capture:
        console.print(live.render())
    shown = capture.get()
    assert "✓ ingest    2.0 s 10 requests" in shown
    assert "4 of 10" in shown
    assert "compute 67% | memory 33%, density 2.00" in shown


def test_a_batch_that_reads_no_kv_has_no_density() -> None:
    assert "no KV read" in balance_bar(1.0, 0.0).plain


def test_a_stream_that_is_no_terminal_gets_plain_lines() -> None:
    stream = io.StringIO()
    with shown_progress(stream, Clock()) as progress:
        progress.note("hello")
    assert stream.getvalue() == "hello\n"
