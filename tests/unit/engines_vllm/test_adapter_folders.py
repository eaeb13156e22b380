"""A folder of a LoRA adapter that vLLM would die of is refused before vLLM is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from blend_core.engines.vllm.adapter_folders import check_adapter_folders
from blend_core.errors import ConfigurationError

TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADER = json.dumps({"__metadata__": {}, "lora_A.weight": TENSOR}).encode()
WHOLE = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)
"""A safetensors file of one tensor."""


def adapter(folder: Path, config: Any, weights: str | None = "adapter_model.safetensors") -> dict[str, Any]:
    (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights is not None:
        (folder / weights).write_bytes(WHOLE)
    return {"lora_adapters": {"support": str(folder)}}


def refusal(options: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_adapter_folders(options)
    return str(caught.value)


def test_what_is_an_adapter_is_let_through(tmp_path: Path) -> None:
    check_adapter_folders({})
    check_adapter_folders(adapter(tmp_path, {"r": 16, "rank_pattern": None}))
    check_adapter_folders(adapter(tmp_path, {"r": 8, "rank_pattern": {"q_proj": 64}}) | {"max_lora_rank": 64})


def test_a_folder_that_is_not_there_is_told_with_its_adapter(tmp_path: Path) -> None:
    told = refusal({"lora_adapters": {"support": str(tmp_path / "gone")}})
    assert told == (
        f"The LoRA adapter 'support' cannot be used: {tmp_path / 'gone'} is no folder of this machine; put "
        "it there, or name another in `lora_adapters` (a job that was submitted keeps its own)."
    )


@pytest.mark.parametrize("folder", ["~nobody-of-that-name/support", f"/{'a' * 5000}", "/a\0b"])
def test_a_path_that_can_be_none_is_no_folder(folder: str) -> None:
    assert "is no folder of this machine" in refusal({"lora_adapters": {"support": folder}})


def test_a_folder_without_what_makes_an_adapter_is_refused(tmp_path: Path) -> None:
    assert "holds no adapter_config.json" in refusal({"lora_adapters": {"support": str(tmp_path)}})
    assert "holds no adapter_model.safetensors" in refusal(adapter(tmp_path, {"r": 8}, weights=None))


@pytest.mark.parametrize("content", [b"", WHOLE[:5], WHOLE[:20], WHOLE[:-1], WHOLE + b"x", b"<html>" * 9])
def test_weights_that_are_cut_off_are_refused(tmp_path: Path, content: bytes) -> None:
    options = adapter(tmp_path, {"r": 8})
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    assert "holds an adapter_model.safetensors that is not whole; copy" in refusal(options)


def test_weights_of_another_format_are_left_to_vllm(tmp_path: Path) -> None:
    check_adapter_folders(adapter(tmp_path, {"r": 8}, weights="adapter_model.bin"))


@pytest.mark.parametrize("config", ["no JSON", [1], {}, {"r": "8"}, {"r": 0}, {"r": 8, "rank_pattern": 3}])
def test_a_configuration_without_a_rank_is_refused(tmp_path: Path, config: Any) -> None:
    assert "rank `r`" in refusal(adapter(tmp_path, config))


def test_a_rank_above_the_highest_is_told_with_the_option_that_raises_it(tmp_path: Path) -> None:
    assert "is of rank 32, and `max_lora_rank` is 16" in refusal(adapter(tmp_path, {"r": 32}))
    options = adapter(tmp_path, {"r": 8, "rank_pattern": {"q_proj": 64}}) | {"max_lora_rank": 32}
    assert "set the vLLM option `max_lora_rank` to 64" in refusal(options)


def test_a_rank_between_those_of_vllm_is_told_the_next_one(tmp_path: Path) -> None:
    assert "set the vLLM option `max_lora_rank` to 32" in refusal(adapter(tmp_path, {"r": 17}))
    assert "is of rank 513, and vLLM serves up to 512" in refusal(adapter(tmp_path, {"r": 513}))


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"use_dora": True}, "is a DoRA adapter, which vLLM does not serve"),
        ({"bias": "lora_only"}, "(`bias` 'lora_only')"),
        ({"bias": None}, "(`bias` None)"),
        ({"lora_bias": True}, "`lora_bias`"),
        (
            {"modules_to_save": ["score", "embed_tokens", "lm_head"]},
            "`modules_to_save` embed_tokens, lm_head",
        ),
        ({"modules_to_save": "score"}, "`modules_to_save` score"),
        ({"init_lora_weights": "pissa_niter_16"}, "`init_lora_weights` 'pissa_niter_16'"),
        ({"alora_invocation_tokens": [1]}, "an Activated LoRA adapter"),
        ({"layer_replication": [[0, 4]]}, "`layer_replication`"),
        ({"use_bdlora": {"nblocks": 2}}, "`use_bdlora`"),
        ({"use_qalora": True}, "a QALoRA adapter"),
    ],
)
def test_an_adapter_of_a_kind_that_vllm_refuses_is_told(
    tmp_path: Path, own: dict[str, Any], told: str
) -> None:
    assert told in refusal(adapter(tmp_path, {"r": 8} | own))


def test_what_vllm_takes_of_these_kinds_is_let_through(tmp_path: Path) -> None:
    plain = {
        "use_dora": False,
        "bias": "none",
        "lora_bias": False,
        "modules_to_save": ["classifier", "score"],
    }
    unset = {"alora_invocation_tokens": None, "layer_replication": None, "use_qalora": False}
    for init in (True, False, None, "gaussian", "EVA"):
        check_adapter_folders(adapter(tmp_path, {"r": 8, "init_lora_weights": init} | plain | unset))
