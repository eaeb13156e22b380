"""Options that do not fit the model are refused before vLLM is loaded, where vLLM is sure to refuse them."""

import json
from pathlib import Path
from typing import Any

import pytest

from blend_core.engines.vllm.model_fit import check_model_fit
from blend_core.errors import ConfigurationError


def check(options: dict[str, Any], folder: Path, name: str = "m") -> None:
    check_model_fit(options, folder, name, is_any_length_taken=False)


def model(folder: Path, **values: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8192} | values))
    return folder


def test_a_context_up_to_the_models_is_let_through(tmp_path: Path) -> None:
    folder = model(tmp_path)
    for options in ({}, {"max_model_len": -1}, {"max_model_len": 1}, {"max_model_len": 8192}):
        check(options, folder)


LLAMA_3 = {"rope_type": "llama3", "factor": 8.0}


@pytest.mark.parametrize(
    "values",
    [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}, {"rope_scaling": LLAMA_3}],
)
def test_a_longer_one_is_told_with_the_models(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check({"max_model_len": 16384}, model(tmp_path, **values), "my-llama")
    assert str(caught.value) == (
        "The vLLM option 'max_model_len' is 16,384, and the context of model my-llama is 8,192 tokens "
        "(max_position_embeddings in its config.json); give at most that, or leave the option out."
    )


LINEAR = {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "values",
    [
        {"rope_scaling": LINEAR},
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}},
        {"model_max_length": 16384},
    ],
)
def test_a_model_of_which_vllm_reckons_another_length_is_left_to_it(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    check({"max_model_len": 16384}, model(tmp_path, **values))


def test_mistrals_own_files_are_left_to_vllm(tmp_path: Path) -> None:
    (tmp_path / "params.json").touch()
    check({"max_model_len": 16384}, model(tmp_path))


def test_who_overrides_the_configuration_may_ask_for_more(tmp_path: Path) -> None:
    options = {"max_model_len": 16384, "hf_overrides": {"rope_parameters": LINEAR}}
    check(options, model(tmp_path))


def test_who_allows_any_length_may_ask_for_more(tmp_path: Path) -> None:
    check_model_fit({"max_model_len": 16384}, model(tmp_path), "m", is_any_length_taken=True)


def test_attention_heads_that_are_cut_are_told_with_their_number(tmp_path: Path) -> None:
    folder = model(tmp_path, num_attention_heads=9)
    for size in (1, 3, 9):
        check({"tensor_parallel_size": size}, folder)
    with pytest.raises(ConfigurationError) as caught:
        check({"tensor_parallel_size": 2}, folder, "my-llama")
    assert str(caught.value) == (
        "The vLLM option 'tensor_parallel_size' is 2, and model my-llama has 9 attention heads "
        "(num_attention_heads in its config.json); give a number that divides them."
    )


@pytest.mark.parametrize(
    "values", [{}, {"num_attention_heads": 9, "text_config": {"num_attention_heads": 8}}]
)
def test_heads_that_only_vllm_finds_are_left_to_it(tmp_path: Path, values: dict[str, Any]) -> None:
    check({"tensor_parallel_size": 2}, model(tmp_path, **values))


def test_who_overrides_the_configuration_may_cut_other_heads(tmp_path: Path) -> None:
    options = {"tensor_parallel_size": 2, "hf_overrides": {"num_attention_heads": 8}}
    check(options, model(tmp_path, num_attention_heads=9))
