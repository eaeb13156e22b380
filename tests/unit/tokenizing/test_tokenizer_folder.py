"""Common folders are loaded as `AutoTokenizer` loads them, and torch is not imported for it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from blend_core.tokenizer_folder import CLASSES, load_tokenizer
from blend_core.tokenizing import Tokenizer

MakeFolder = Callable[..., Path]

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


def with_class(folder: Path, name: str, **more: object) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name} | more))
    return folder


@pytest.mark.parametrize(("model_type", "tokenizer_class"), sorted(CLASSES))
def test_the_class_and_its_ids_are_those_of_the_library(
    make_folder: MakeFolder, model_type: str, tokenizer_class: str
) -> None:
    from transformers import AutoTokenizer

    folder = with_class(make_folder(TEMPLATE, model_type=model_type), tokenizer_class)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    chat = [{"role": "user", "content": "ab"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    assert ours("ab") == theirs("ab")


def test_a_folder_of_another_kind_is_left_to_the_library(make_folder: MakeFolder) -> None:
    folder = with_class(make_folder(TEMPLATE), "LlamaTokenizerFast")
    assert Tokenizer(folder).render_chat([{"role": "user", "content": "ab"}]) == "<s>ab"


@pytest.mark.parametrize(("model_type", "tokenizer_class"), sorted(CLASSES))
def test_a_chat_of_a_common_folder_is_encoded_without_torch(
    make_folder: MakeFolder, model_type: str, tokenizer_class: str
) -> None:
    folder = with_class(make_folder(TEMPLATE, model_type=model_type), tokenizer_class)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from blend_core.tokenizing import Tokenizer\n"
        "tokenizer = Tokenizer(Path(sys.argv[1]))\n"
        "tokenizer.encode_chat([[{'role': 'user', 'content': 'ab'}]])\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n", done.stderr
