"""Greedy tokens in float32 are those of the reference implementation on the same folder."""

from pathlib import Path

import pytest

from tests.tiny_llama import make_tiny_llama
from tests.unit.engines_torch.reference import Reference
from tests.unit.engines_torch.runs import random_requests, run

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "model",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
        {"model_type": "qwen2"},
        {"model_type": "qwen3"},
    ],
    ids=["llama", "llama-3-rope-tied", "qwen2", "qwen3"],
)
def test_greedy_tokens_equal_the_reference(tmp_path: Path, model: dict[str, object]) -> None:
    folder = make_tiny_llama(tmp_path / "model", **model)  # type: ignore[arg-type]  # keywords by case
    requests = random_requests(32)

    outcome = run(folder, requests, num_blocks=600)

    assert outcome.total("num_cached_tokens") > 1000, "the shared start was not reused"
    assert any(window.num_prefill_tokens and window.num_decode_tokens for window in outcome.windows)
    reference = Reference(folder)
    for one in requests:
        reference.check(one, outcome.tokens[one.seq])
