"""Windows are sums over single steps, closed by steps, by time or by a plan revision."""

from dataclasses import replace

import pytest

from blend_core.engines.windows import StepRecord, WindowAccumulator
from blend_core.performance import StepTimeModel, step_cost
from blend_core.specs import DeviceProfile, ModelSpec

MODEL = ModelSpec("m", 1_000, 2, 8, 2, 1, 4, 2, 4096, 100)
DEVICE = DeviceProfile("d", 1e6, 1e5, 1e9, 0.5, 1e-4, 0.8, 0.15)
STEP = StepRecord(
    started_at=100.0,
    duration_s=0.01,
    num_prefill_tokens=7,
    num_decode_tokens=3,
    num_cached_tokens=16,
    num_recomputed_tokens=2,
    prefill_tokens_sq=49,
    decode_kv_tokens=60,
    kv_usage=0.25,
    num_running_left=2,
    num_running_right=1,
    num_preempted=1,
    num_finished=1,
)


def accumulator(overlap=False):
    return WindowAccumulator(MODEL, DEVICE, revision=0, overlap=overlap)


def test_a_window_closes_after_64_steps():
    windows = accumulator()
    closed = [windows.add(replace(STEP, started_at=100 + i * 0.01)) for i in range(64)]
    assert closed[:-1] == [None] * 63
    assert closed[-1].num_steps == 64
    assert windows.flush() is None


def test_a_window_closes_after_one_second_and_leaves_idle_time_out_of_its_duration():
    windows = accumulator()
    assert windows.add(replace(STEP, started_at=10.0, duration_s=0.125)) is None
    window = windows.add(replace(STEP, started_at=10.9, duration_s=0.125))
    assert window.num_steps == 2
    assert window.started_at == 10.0
    assert window.duration_s == 0.25


def test_a_revision_closes_the_window_before_it():
    windows = accumulator()
    windows.add(STEP)
    assert windows.revise(3).revision == 0
    windows.add(STEP)
    after = windows.flush()
    assert (after.revision, after.batch_index, after.num_steps) == (3, 1, 1)


def test_a_revision_without_steps_before_it_closes_nothing():
    assert accumulator().revise(1) is None


def test_counts_are_sums_and_levels_are_means():
    windows = accumulator()
    windows.add(STEP)
    windows.add(replace(STEP, kv_usage=0.75, num_running_left=4, num_running_right=0))
    window = windows.flush()
    assert (window.num_prefill_tokens, window.num_decode_tokens) == (14, 6)
    assert (window.num_cached_tokens, window.num_recomputed_tokens) == (32, 4)
    assert (window.prefill_tokens_sq, window.decode_kv_tokens) == (98, 120)
    assert (window.num_preempted, window.num_finished) == (2, 2)
    assert (window.kv_usage, window.num_running_left, window.num_running_right) == (0.5, 3.0, 0.5)


@pytest.mark.parametrize("overlap", [False, True])
def test_costs_are_the_performance_models(overlap):
    windows = accumulator(overlap)
    windows.add(STEP)
    windows.add(replace(STEP, num_prefill_tokens=0, prefill_tokens_sq=0))
    window = windows.flush()
    cost = step_cost(MODEL, DEVICE, 13, 49, 120)
    assert window.compute_s == pytest.approx(cost.compute_s)
    assert window.memory_s == pytest.approx(cost.memory_s)
    assert window.measured_density == pytest.approx(cost.compute_s / cost.memory_s)
    assert window.predicted_s == pytest.approx(
        StepTimeModel.of(MODEL, DEVICE).step_s(10, 49, 60, overlap=overlap)
        + StepTimeModel.of(MODEL, DEVICE).step_s(3, 0, 60, overlap=overlap)
    )


def test_a_window_that_read_no_kv_has_no_density():
    windows = accumulator()
    windows.add(replace(STEP, num_decode_tokens=0, decode_kv_tokens=0))
    assert windows.flush().measured_density is None
