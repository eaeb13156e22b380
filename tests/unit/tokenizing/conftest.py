import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Writes a tokenizer of single bytes whose token ids are easy to foretell: `<s>` 0, `</s>` 1, "a" 67."""

    def make(chat_template: str | None = None, *, adds_bos: bool = True, **config: Any) -> Path:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
        fast = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens(["<s>", "</s>"])
        if adds_bos:
            fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        fast.save(str(folder / "tokenizer.json"))
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "chat_template": chat_template,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        (folder / "config.json").write_text(
            json.dumps({"model_type": "llama", "vocab_size": len(vocab), **config})
        )
        return folder

    return make
