"""The performance model against the published anchors and the setting of the studies."""

from dataclasses import replace

import numpy as np
import pytest

from blend_core.performance import (
    StepTimeModel,
    compute_density,
    compute_s,
    memory_s,
    practical_optimum_s,
    step_cost,
)
from blend_core.specs import DeviceProfile, ModelSpec


def paper_density(model: ModelSpec, device: DeviceProfile, p: int, d: int) -> float:
    """The paper's form: the quadratic term dropped."""
    linear_only = replace(model, num_heads=0)
    return float(compute_density(compute_s(linear_only, device, p, d), memory_s(model, device, p, d)))


def test_llama_holds_128_kib_of_kv_per_token(llama_8b: ModelSpec) -> None:
    assert llama_8b.kv_bytes_per_token == 131_072


def test_density_of_the_papers_example_is_5_93(llama_8b: ModelSpec, a100: DeviceProfile) -> None:
    assert paper_density(llama_8b, a100, 600, 150) == pytest.approx(5.93, abs=0.005)


@pytest.mark.parametrize("d", [10, 100, 1000])
def test_density_of_long_prompts_tends_to_801_over_d(
    llama_8b: ModelSpec, a100: DeviceProfile, d: int
) -> None:
    assert paper_density(llama_8b, a100, 10_000_000, d) == pytest.approx(801 / d, rel=0.001)


def test_prefill_attention_is_causal_and_skips_cached_tokens(
    llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    whole = compute_s(llama_8b, a100, 1000, 0)
    first, second = compute_s(llama_8b, a100, 600, 0), compute_s(llama_8b, a100, 1000, 0, 600)
    assert whole == pytest.approx(first + second)
    quadratic = whole - 2 * 1000 * llama_8b.num_parameters / a100.compute_flops_per_s
    assert quadratic == pytest.approx(2 * 4096 * 32 * 1000**2 / 312e12)


def test_spread_of_lengths_adds_to_memory(llama_8b: ModelSpec, a100: DeviceProfile) -> None:
    lengths = np.array([10.0, 1000.0])
    mean_of_both = memory_s(llama_8b, a100, 50, lengths).mean()
    mean, second_moment = lengths.mean(), (lengths**2).mean()
    assert memory_s(llama_8b, a100, 50, mean, second_moment) == pytest.approx(mean_of_both)
    assert memory_s(llama_8b, a100, 50, mean) < mean_of_both


@pytest.mark.parametrize("num_output_tokens", [0, 1])
def test_shortest_answers_have_a_density(
    llama_8b: ModelSpec, a100: DeviceProfile, num_output_tokens: int
) -> None:
    memory = memory_s(llama_8b, a100, 100, num_output_tokens)
    density = compute_density(compute_s(llama_8b, a100, 100, num_output_tokens), memory)
    assert density > 1
    assert np.isinf(density) == (num_output_tokens == 0)


def test_costs_of_steps_add_up_to_those_of_their_requests(llama_8b: ModelSpec, a100: DeviceProfile) -> None:
    # One request of 64 prompt tokens in two chunks, then three decode steps reading 65, 66 and 67 tokens.
    steps = [
        step_cost(llama_8b, a100, 40, 40**2, 0),
        step_cost(llama_8b, a100, 24, 64**2 - 40**2, 0),
        *(step_cost(llama_8b, a100, 1, 0, kv) for kv in (65, 66, 67)),
    ]
    assert sum(step.compute_s for step in steps) == pytest.approx(float(compute_s(llama_8b, a100, 64, 3)))
    together = step_cost(llama_8b, a100, 67, 64**2, 65 + 66 + 67)
    assert together.memory_s == pytest.approx(sum(step.memory_s for step in steps))
    assert together.density == pytest.approx(together.compute_s / together.memory_s)
    assert steps[0].density is None


def test_a100_has_the_step_time_of_the_studies(llama_8b: ModelSpec, a100: DeviceProfile) -> None:
    times = StepTimeModel.of(llama_8b, a100)
    assert times.gemm_fixed_s == pytest.approx(5.3e-3, rel=1e-12)
    assert times.gemm_s_per_token == pytest.approx(57.3e-6, rel=1e-12)
    assert times.weight_read_s == pytest.approx(2 * llama_8b.num_parameters / 2039e9)
    assert times.gemm_s(2048) == pytest.approx(5.3e-3 + 57.3e-6 * 2048)
    assert times.gemm_s(1) == times.weight_read_s
    assert times.gemm_s(0) == 0.0


def test_overlap_takes_the_longer_part_and_15_percent_of_the_shorter(
    llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    gemm = 5.3e-3 + 57.3e-6 * 1000 + 2 * 4096 * 32 * 500**2 / 312e12
    attention = 300_000 * 131_072 / (0.8 * 2039e9)
    times = StepTimeModel.of(llama_8b, a100)
    sequential = times.step_s(1000, 500**2, 300_000, overlap=False)
    overlapped = times.step_s(1000, 500**2, 300_000, overlap=True)
    assert sequential == pytest.approx(gemm + attention)
    assert overlapped == pytest.approx(max(gemm, attention) + 0.15 * min(gemm, attention))


def test_practical_optimum_follows_the_setting_of_the_studies(
    llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    p, shared = np.array([1000, 800, 120]), np.array([0, 512, 0])
    d = np.array([100, 2, 30_000])
    num_tokens = (p - shared).sum() + d.sum()
    num_steps = max(((p - shared) * d + d**2 / 2).sum() / (60e9 / 131_072), num_tokens / 2048, 30_000)
    compute = 5.3e-3 * num_steps + 57.3e-6 * num_tokens + 2 * 4096 * 32 * (p**2 - shared**2).sum() / 312e12
    memory = (p * d + d**2 / 2).sum() * 131_072 / (0.8 * 2039e9)
    expected = max(compute, memory) + 0.15 * min(compute, memory)
    assert practical_optimum_s(llama_8b, a100, p, shared, d) == pytest.approx(expected)


def test_no_requests_need_no_time(llama_8b: ModelSpec, a100: DeviceProfile) -> None:
    assert practical_optimum_s(llama_8b, a100, [], [], []) == 0.0
