import json
from pathlib import Path

import pytest
import torch

from blend_core.engines.torch.engine import TorchEngine
from blend_core.engines.torch.linear import PackedLinear, PlainLinear, can_pack
from blend_core.errors import BlendError, ConfigurationError, EngineStartError
from tests.tiny_llama import make_tiny_llama
from tests.unit.engines_torch.runs import options


def config_with(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "none named"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "Partial rotary"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": "wide"}, "wide"),
        ({"num_hidden_layers": None}, "wrong kind"),
        ({"use_sliding_window": True}, "Sliding-window"),
        ({"num_attention_heads": 8}, "q_proj"),
        ({"num_hidden_layers": 3}, r"layers\.2"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    folder = make_tiny_llama(tmp_path / "model")
    config_with(folder, **changes)
    with pytest.raises(ConfigurationError, match=named):
        TorchEngine(options(folder)).open()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, "damaged"])
def test_a_missing_or_damaged_file_is_refused_by_name(tmp_path: Path, name: str, content: str | None) -> None:
    folder = make_tiny_llama(tmp_path / "model")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ConfigurationError, match=name.removeprefix("model.")):
        TorchEngine(options(folder)).open()


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"dtype": "int4"}, ConfigurationError, "int4"),
        ({"max_num_seqs": 0}, ConfigurationError, "max_num_seqs"),
        ({"max_num_batched_tokens": 4}, ConfigurationError, "max_num_batched_tokens"),
        ({"kv_capacity_bytes": 10_000_000}, ConfigurationError, "not both"),
        ({"num_blocks": None, "kv_capacity_bytes": 10}, ConfigurationError, "holds no block"),
        ({"device": "abacus"}, EngineStartError, "abacus"),
        ({"policy": "coin"}, ConfigurationError, "coin"),
    ],
)
def test_options_that_make_no_sense_are_named(
    tiny_llama: Path, changes: dict[str, object], error: type[BlendError], named: str
) -> None:
    with pytest.raises(error, match=named):
        TorchEngine(options(tiny_llama, **changes)).open()


def test_the_profiles_capacity_sizes_the_cache(tiny_llama: Path) -> None:
    info = TorchEngine(options(tiny_llama, num_blocks=None)).open()
    # 2 (K, V) x 2 layers x 2 heads x 32 x 4 bytes a token, 16 tokens a block, out of 10 MB
    assert info.limits.num_blocks == 10_000_000 // (2 * 2 * 2 * 32 * 4 * 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 7, 100])
def test_packed_products_equal_plain_ones(dtype: torch.dtype, num_rows: int) -> None:
    if not can_pack(torch.device("cpu"), dtype):
        pytest.skip("no packed products on this machine")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype)
    rows = torch.randn(num_rows, 64, generator=generator).to(dtype)
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(
        PackedLinear(weight, bias)(rows), PlainLinear(weight, bias)(rows), rtol=tolerance, atol=tolerance
    )
