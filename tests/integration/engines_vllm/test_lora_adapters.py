"""Requests run under the LoRA adapter that they name, and no other."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blend_core.engines.process import EngineProcess
from blend_core.engines.vllm.factory import make_vllm_engine
from blend_core.errors import EngineStartError
from blend_core.request import Request, SamplingParams
from tests.integration.engines_vllm.vllm_runs import Block32Source, options
from tests.unit.engines_torch.reference import Reference
from tests.unit.engines_torch.runs import Outcome, request

RANK = 8
ALPHA = 16
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def make_adapter(model: Path, folder: Path, seed: int) -> tuple[Path, Path]:
    """A random adapter of the model's attention outputs, and the model with it merged in."""
    generator = torch.Generator().manual_seed(seed)
    adapter, merged = folder / f"adapter-{seed}", folder / f"merged-{seed}"
    adapter.mkdir()
    shutil.copytree(model, merged)
    weights = load_file(merged / "model.safetensors")
    parts = {}
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.o_proj"
        num_out, num_in = weights[f"{name}.weight"].shape
        down = torch.randn(RANK, num_in, generator=generator) * 0.2
        up = torch.randn(num_out, RANK, generator=generator) * 0.2
        parts[f"base_model.model.{name}.lora_A.weight"] = down
        parts[f"base_model.model.{name}.lora_B.weight"] = up
        weights[f"{name}.weight"] += ALPHA / RANK * up @ down
    save_file(parts, adapter / "adapter_model.safetensors")
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["o_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
    return adapter, merged


@pytest.mark.slow
def test_answers_are_those_of_the_model_with_the_adapter_merged_in(tiny_llama: Path, tmp_path: Path) -> None:
    made = {name: make_adapter(tiny_llama, tmp_path, seed) for seed, name in enumerate(("mild", "bold"))}
    passed = {
        "separate_core": False,
        "num_gpu_blocks_override": 601,
        "lora_adapters": {name: str(adapter) for name, (adapter, _) in made.items()},
        # One adapter has a place at a time: requests of the other wait until none of it runs.
        "max_loras": 1,
        "max_lora_rank": RANK,
    }
    asked = [
        Request(seq, request(seq, range(3 + seq, 60 + seq)).prompt_token_ids, GREEDY, adapter)
        for seq, adapter in enumerate(4 * [None, *made])
    ]
    process = EngineProcess(partial(make_vllm_engine, options(tiny_llama, passed=passed)))
    outcome = Outcome()
    try:
        process.open()
        for event in process.run(Block32Source(asked)):
            outcome.add(event)
    finally:
        process.close()

    assert sorted(outcome.finished) == list(range(len(asked)))
    references = {None: Reference(tiny_llama)} | {
        name: Reference(merged) for name, (_, merged) in made.items()
    }
    for one in asked:
        references[one.lora_adapter].check(one, outcome.tokens[one.seq])


@pytest.mark.slow
def test_an_adapter_of_another_model_is_told_when_the_engine_opens(tiny_llama: Path, tmp_path: Path) -> None:
    adapter, _ = make_adapter(tiny_llama, tmp_path, 0)
    weights = load_file(adapter / "adapter_model.safetensors")
    other = {name: torch.cat((tensor, tensor), dim=-1) for name, tensor in weights.items()}
    save_file(other, adapter / "adapter_model.safetensors")
    passed = {"num_gpu_blocks_override": 601, "lora_adapters": {"support": str(adapter)}}
    process = EngineProcess(partial(make_vllm_engine, options(tiny_llama, passed=passed)))
    try:
        with pytest.raises(EngineStartError, match=r"cannot use the LoRA adapter 'support'.*; name one that"):
            process.open()
    finally:
        process.close()
