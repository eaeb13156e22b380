"""Model sizes from Hugging Face configurations, and device profiles from files."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from blend_core.device_measure import GEMM_TOKENS, MeasureSizes, measure_cpu_profile
from blend_core.errors import ConfigurationError
from blend_core.performance import StepTimeModel, compute_s
from blend_core.specs import (
    DeviceProfile,
    ModelSpec,
    device_profile_names,
    load_device_profile,
    load_model_spec,
    model_spec_from_hf_config,
    model_spec_preset,
    model_spec_preset_names,
    save_device_profile,
)

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 131072,
}
SMOLLM2: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
QWEN3_0_6B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
LLAMA_70B: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
MIXTRAL_8X7B: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": None,
}
QWEN15_MOE: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "use_sliding_window": False,
    "sliding_window": 32768,
}
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
}
DEEPSEEK_V3: dict[str, Any] = {
    **DEEPSEEK_V2_LITE,
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "vocab_size": 129280,
}


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (LLAMA_70B, 70.6e9, 70.6e9),
        (MIXTRAL_8X7B, 46.7e9, 12.9e9),
        (QWEN15_MOE, 14.3e9, 2.7e9),
        (QWEN3_30B, 30.5e9, 3.3e9),
        (DEEPSEEK_V2_LITE, 15.7e9, 2.66e9),
        (DEEPSEEK_V3, 671e9, 37.5e9),
    ],
    ids=["llama-70b", "mixtral-8x7b", "qwen1.5-moe", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3"],
)
def test_totals_and_active_parameters_come_out_as_published(
    config: dict[str, Any], total: float, active: float
) -> None:
    spec = model_spec_from_hf_config(config, "model", "bf16")
    assert spec.num_parameters == pytest.approx(total, rel=0.005)
    assert spec.parameters_per_token == pytest.approx(active, rel=0.02)


def test_experts_cost_compute_where_a_token_passes_and_weight_reads_all_over() -> None:
    spec = model_spec_from_hf_config(MIXTRAL_8X7B, "mixtral", "bf16")
    device = load_device_profile("a100-80g")
    times = StepTimeModel.of(spec, device)
    assert times.weight_read_s == pytest.approx(2 * 46.7e9 / 2039e9, rel=0.01)
    linear = float(compute_s(spec, device, 1000, 10) - compute_s(spec, device, 1000, 0))
    assert linear == pytest.approx(2 * 10 * 12.9e9 / 312e12, rel=0.01)


def test_latent_attention_keeps_one_vector_for_all_heads() -> None:
    spec = model_spec_from_hf_config(DEEPSEEK_V3, "v3", "bf16")
    assert spec.kv_bytes_per_token == (512 + 64) * 61 * 2
    # Queries and keys are 192 wide, values 128.
    assert spec.attention_width == 128 * 160
    headed = model_spec_from_hf_config({**LLAMA_8B, "num_key_value_heads": None}, "mha", "bf16")
    assert headed.kv_bytes_per_token == 4 * model_spec_preset("llama-3.1-8b").kv_bytes_per_token


def test_dense_layers_among_experts_are_counted_as_dense() -> None:
    sparse = model_spec_from_hf_config(QWEN3_30B, "m", "bf16")
    mixed = model_spec_from_hf_config({**QWEN3_30B, "mlp_only_layers": [0, 1]}, "m", "bf16")
    layer = 3 * 2048 * 6144 - (2048 * 128 + 128 * 3 * 2048 * 768)
    assert mixed.num_parameters == sparse.num_parameters + 2 * layer
    every_other = model_spec_from_hf_config({**QWEN3_30B, "decoder_sparse_step": 2}, "m", "bf16")
    assert every_other.num_parameters == sparse.num_parameters + 24 * layer


def test_tensor_parallel_devices_add_up() -> None:
    one = load_device_profile("a100-80g")
    eight = one.scaled(8, efficiency=0.9)
    assert eight.name == "a100-80g-x8"
    assert eight.compute_flops_per_s == pytest.approx(7.2 * one.compute_flops_per_s)
    assert eight.bandwidth_bytes_per_s == pytest.approx(7.2 * one.bandwidth_bytes_per_s)
    assert eight.kv_capacity_bytes == 8 * one.kv_capacity_bytes
    assert eight.gemm_fixed_s_per_layer == one.gemm_fixed_s_per_layer
    for num_devices, efficiency in ((0, 1.0), (2, 0.0), (2, 1.1)):
        with pytest.raises(ConfigurationError, match="efficiency"):
            one.scaled(num_devices, efficiency)


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [(LLAMA_8B, 8_030_261_248), (QWEN2_7B, 7_615_616_512), (SMOLLM2, 134_515_008), (QWEN3_0_6B, 596_049_920)],
    ids=["llama-8b", "qwen2-7b", "smollm2-tied", "qwen3-tied"],
)
def test_parameters_are_counted_as_published(config: dict[str, Any], num_parameters: int) -> None:
    assert model_spec_from_hf_config(config, "model", "bf16").num_parameters == num_parameters


def test_head_size_may_differ_from_hidden_over_heads() -> None:
    spec = model_spec_from_hf_config(QWEN3_0_6B, "model", "float32")
    assert (spec.head_size, spec.num_heads, spec.dtype_bytes) == (128, 16, 4)


def test_presets_equal_their_configurations() -> None:
    assert model_spec_preset("llama-3.1-8b") == model_spec_from_hf_config(LLAMA_8B, "llama-3.1-8b", "bf16")
    assert model_spec_preset("qwen2.5-7b") == model_spec_from_hf_config(QWEN2_7B, "qwen2.5-7b", "bf16")
    assert model_spec_preset("mixtral-8x7b") == model_spec_from_hf_config(
        MIXTRAL_8X7B, "mixtral-8x7b", "bf16"
    )
    assert model_spec_preset("deepseek-v3") == model_spec_from_hf_config(DEEPSEEK_V3, "deepseek-v3", "bf16")
    assert set(model_spec_preset_names()) >= {"llama-3.1-8b", "llama-3.1-70b", "llama-2-7b", "qwen2.5-7b"}
    for name in model_spec_preset_names():
        assert model_spec_preset(name).name == name


def test_spec_is_read_from_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    assert load_model_spec(folder, "bfloat16") == replace(model_spec_preset("llama-3.1-8b"), name="tiny")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({**DEEPSEEK_V3, "attention_bias": True}, "biases"),
        ({**DEEPSEEK_V3, "kv_lora_rank": None}, "kv_lora_rank"),
        ({**MIXTRAL_8X7B, "num_experts_per_tok": 9}, "9 of 8 experts"),
        ({**MIXTRAL_8X7B, "num_local_experts": None}, "num_local_experts"),
        ({"model_type": None}, "None"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_key_value_heads": 5}, "no whole number for each"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding window"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "has 'many' as vocab_size; make it a whole number"),
        ({"sliding_window": "4096"}, "has '4096' as sliding_window"),
        ({"model_type": "mistral", "max_position_embeddings": "x", "sliding_window": 9}, "'x' as max_pos"),
        ({"num_hidden_layers": 10**12}, "as num_hidden_layers; make it a whole number from 1 to 10,000"),
        ({"hidden_size": 4096.0}, "has 4096.0 as hidden_size"),
        ({"tie_word_embeddings": "false"}, "has 'false' as tie_word_embeddings; make it true or false"),
        ({**DEEPSEEK_V3, "first_k_dense_replace": "x"}, "has 'x' as first_k_dense_replace"),
        ({**DEEPSEEK_V3, "n_shared_experts": -1}, "has -1 as n_shared_experts"),
        ({**QWEN3_30B, "mlp_only_layers": "0, 1"}, "as mlp_only_layers; make it a list of whole numbers"),
    ],
)
def test_what_the_formulas_do_not_cover_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        model_spec_from_hf_config({**LLAMA_8B, **change}, "model", "bf16")


def test_mistral_without_a_window_is_covered() -> None:
    spec = model_spec_from_hf_config(
        {**LLAMA_8B, "model_type": "mistral", "sliding_window": None}, "m", "fp16"
    )
    assert isinstance(spec, ModelSpec)


def test_unknown_dtype_and_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="int4"):
        model_spec_from_hf_config(LLAMA_8B, "model", "int4")
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        load_model_spec(tmp_path, "bf16")


def test_profiles_ship_by_name() -> None:
    assert set(device_profile_names()) >= {"a100-80g", "h100", "h200", "l4", "cpu"}
    for name in device_profile_names():
        assert load_device_profile(name).name == name


def test_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="a100-80g"):
        load_device_profile("abacus")


def test_saved_profile_is_read_back_exactly(tmp_path: Path) -> None:
    profile = replace(load_device_profile("a100-80g"), name='odd "name"', bandwidth_bytes_per_s=1 / 3e-12)
    save_device_profile(profile, tmp_path / "mine.toml")
    assert load_device_profile(str(tmp_path / "mine.toml")) == profile


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("kv_capacity_bytes = 0", "has 0 as kv_capacity_bytes; make it a number from 1000 to 1e"),
        ('kv_capacity_bytes = "much"', "has 'much' as kv_capacity_bytes; make it a number"),
        ("kv_capacity_bytes = true", "has True as kv_capacity_bytes; make it a number"),
        ("kv_capacity_bytes = nan", "has nan as kv_capacity_bytes"),
        ("kv_capacity_bytes = inf", "has inf as kv_capacity_bytes"),
        ("kv_capacity_bytes = 5e-324", "has 5e-324 as kv_capacity_bytes"),
        ("kv_capacity_bytes = 1" + "0" * 400, "as kv_capacity_bytes"),
        ("", "lacks kv_capacity_bytes"),
        ("kv_capacity_bytes = 1e9\nturbo = true", "turbo"),
        ("= =", "TOML"),
    ],
)
def test_faulty_profile_is_refused_by_name(tmp_path: Path, line: str, named: str) -> None:
    values = asdict(load_device_profile("cpu"))
    del values["kv_capacity_bytes"]
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    (tmp_path / "bad.toml").write_text("\n".join([*lines, line]))
    with pytest.raises(ConfigurationError, match=named):
        load_device_profile(str(tmp_path / "bad.toml"))


def test_measured_profile_is_usable_and_survives_its_file(tmp_path: Path) -> None:
    small = MeasureSizes(hidden_size=64, intermediate_size=128, stream_bytes=1 << 20, num_repeats=2)
    profile = measure_cpu_profile("here", sizes=small)
    assert profile.compute_flops_per_s > 0
    assert 0 < profile.gemm_efficiency <= 1
    assert 0 < profile.attention_bandwidth_efficiency <= 1
    save_device_profile(profile, tmp_path / "here.toml")
    assert load_device_profile(str(tmp_path / "here.toml")) == profile


def test_attention_efficiency_of_a_measured_profile_is_kv_read_over_the_bandwidth() -> None:
    sizes = MeasureSizes(
        hidden_size=64, intermediate_size=128, context_tokens=512, stream_bytes=1 << 20, num_repeats=2
    )

    def measured(attention_s: float) -> DeviceProfile:
        # Every repeat reads the clock twice. Steps of four sizes and decode attention come before the stream.
        durations = [1.0] * 2 * len(GEMM_TOKENS) + [attention_s] * 2 + [1.0] * 2
        ticks = itertools.chain.from_iterable((0.0, duration) for duration in durations)
        return measure_cpu_profile("here", sizes=sizes, clock=lambda: next(ticks))

    # One request of 786,432 bytes fits the stream's 1,048,576.
    slow = measured(attention_s=3.0)
    assert slow.bandwidth_bytes_per_s == 1 << 20
    assert slow.attention_bandwidth_efficiency == pytest.approx(0.25)
    # Attention on more threads than the stream has: then it is what tells the bandwidth.
    fast = measured(attention_s=0.5)
    assert fast.bandwidth_bytes_per_s == 2 * 786_432
    assert fast.attention_bandwidth_efficiency == 1.0


@pytest.mark.parametrize("name", ["", "a\nb", "a\0b", "x" * 101])
def test_a_profile_has_a_name_of_one_short_line(tmp_path: Path, name: str) -> None:
    save_device_profile(replace(load_device_profile("cpu"), name=name), tmp_path / "bad.toml")
    with pytest.raises(ConfigurationError, match="as name; make it one line of 1 to 100 characters"):
        load_device_profile(str(tmp_path / "bad.toml"))


def test_a_profile_that_cannot_be_read_or_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_device_profile(str(tmp_path / "nowhere.toml"))
    with pytest.raises(ConfigurationError, match="name a file in a folder"):
        save_device_profile(load_device_profile("cpu"), tmp_path / "nowhere" / "mine.toml")
