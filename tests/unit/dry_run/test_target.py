"""What a model needs of a device that is not here."""

from dataclasses import replace

import pytest

from blend_core.errors import ConfigurationError
from blend_core.specs import DeviceProfile, load_device_profile, model_spec_preset
from flows.dry_run.target import own_target, target_of
from flows.job_parts import JobOptions
from flows.serving import Serving
from flows.settings import EngineSettings


@pytest.fixture
def a100() -> DeviceProfile:
    return load_device_profile("a100-80g")


def test_the_profiled_model_gets_the_profiled_kv(a100: DeviceProfile) -> None:
    target = target_of(model_spec_preset("llama-3.1-8b"), a100, block_size=16)
    assert (target.tensor_parallel, target.device) == (1, a100)
    assert target.limits.num_blocks == 60_000_000_000 // (16 * 131_072)


def test_a_smaller_model_gets_no_more_kv_than_was_profiled(a100: DeviceProfile) -> None:
    assert target_of(model_spec_preset("llama-2-7b"), a100, block_size=16).device == a100


def test_weights_that_one_device_does_not_hold_are_split(a100: DeviceProfile) -> None:
    model = model_spec_preset("llama-3.1-70b")
    target = target_of(model, a100, block_size=16)
    assert target.tensor_parallel == 4
    assert target.device.compute_flops_per_s == 4 * a100.compute_flops_per_s
    weights = 2 * model.num_parameters
    # All that four devices have, less the weights: nothing is counted twice.
    assert target.device.kv_capacity_bytes == pytest.approx(4 * (60e9 + 2 * 8_030_261_248) - weights)


def test_a_number_of_devices_may_be_asked_for(a100: DeviceProfile) -> None:
    model = model_spec_preset("llama-3.1-70b")
    target = target_of(model, a100, block_size=16, tensor_parallel=8)
    assert target.tensor_parallel == 8
    assert target.device.kv_capacity_bytes == pytest.approx(
        8 * (60e9 + 2 * 8_030_261_248) - 2 * model.num_parameters
    )
    with pytest.raises(ConfigurationError, match="does not fit 1 device"):
        target_of(model, a100, block_size=16, tensor_parallel=1)


@pytest.mark.parametrize("num_devices", [3, 5, 6, 7, 12])
def test_devices_that_would_cut_heads_are_refused_with_the_numbers_that_do_not(
    a100: DeviceProfile, num_devices: int
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        target_of(model_spec_preset("llama-3.1-8b"), a100, block_size=16, tensor_parallel=num_devices)
    assert refused.value.message == (
        f"{num_devices} devices cannot share the heads of llama-3.1-8b; name one of 1, 2, 4, 8, 16, 32."
    )


def test_attention_heads_are_not_cut_either_nor_where_kv_is_latent(a100: DeviceProfile) -> None:
    model = replace(model_spec_preset("llama-3.1-8b"), num_heads=24, num_kv_heads=8)
    target = target_of(model, a100, block_size=16, tensor_parallel=24)
    assert target.tensor_parallel == 24
    with pytest.raises(ConfigurationError, match=r"name one of 1, 2, 4, 8, 24\."):
        target_of(model, a100, block_size=16, tensor_parallel=16)
    latent = replace(model_spec_preset("deepseek-v3"), num_heads=128)
    assert target_of(latent, a100, block_size=16, tensor_parallel=32).tensor_parallel == 32
    with pytest.raises(ConfigurationError, match="cannot share the heads of deepseek-v3"):
        target_of(latent, a100, block_size=16, tensor_parallel=24)


def test_the_number_of_devices_that_is_chosen_cuts_no_head(a100: DeviceProfile) -> None:
    model = replace(model_spec_preset("llama-3.1-70b"), num_heads=4, num_kv_heads=4)
    assert target_of(model, a100, block_size=16).tensor_parallel == 4
    with pytest.raises(ConfigurationError, match="does not fit 2 devices"):
        target_of(replace(model, num_heads=2, num_kv_heads=2), a100, block_size=16)


def test_a_larger_device_needs_fewer(a100: DeviceProfile) -> None:
    model = model_spec_preset("llama-3.1-70b")
    assert target_of(model, load_device_profile("h200"), block_size=16).tensor_parallel == 2
    assert target_of(model, load_device_profile("l4"), block_size=16).tensor_parallel > 4


def test_latent_kv_is_kept_by_every_device(a100: DeviceProfile) -> None:
    model = model_spec_preset("deepseek-v3")
    target = target_of(model, a100, block_size=16)
    by_head = replace(model, latent_kv_size=None)
    whole = target_of(by_head, a100, block_size=16)
    assert target.tensor_parallel == whole.tensor_parallel > 1
    assert target.device.kv_capacity_bytes * target.tensor_parallel == pytest.approx(
        whole.device.kv_capacity_bytes
    )


def test_a_model_for_no_number_of_devices_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="larger"):
        target_of(model_spec_preset("deepseek-v3"), load_device_profile("l4"), block_size=16)


def test_the_own_engine_is_planned_as_it_would_be_opened(a100: DeviceProfile) -> None:
    engine = EngineSettings(kv_gib=2.0, block_size=32, max_num_seqs=7, max_num_batched_tokens=300)
    target = own_target(model_spec_preset("llama-3.1-8b"), a100, Serving.of(engine, JobOptions()))
    assert target.limits.num_blocks == 2**31 // (32 * 131_072)
    assert (target.limits.max_num_seqs, target.limits.max_num_batched_tokens) == (7, 300)
    assert target.device.kv_capacity_bytes == 2**31
