"""Token ids are the model's own: one beginning-of-sequence token, and errors that stay with their request."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from blend_core.errors import ConfigurationError, RequestError, RequestErrorCode
from blend_core.tokenizing import TokenIds, Tokenizer

MakeFolder = Callable[..., Path]

BOS = 0
PLAIN = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + PLAIN
USER = [{"role": "user", "content": "ab"}]


def ids(encoded: TokenIds | RequestError) -> list[int]:
    assert not isinstance(encoded, RequestError), encoded
    assert encoded.dtype == np.int32
    assert not encoded.flags.writeable
    return list(map(int, encoded))


def of_text(text: str) -> list[int]:
    # The alphabet in order: "!" is its first character and has id 2.
    return [ord(char) - ord("!") + 2 for char in text]


def test_golden_ids_of_a_template_that_writes_the_bos_token(make_folder: MakeFolder) -> None:
    tokenizer = Tokenizer(make_folder(WITH_BOS))
    assert ids(tokenizer.encode_chat([USER])[0]) == [BOS, *of_text("u:ab;>")]


def test_golden_ids_of_a_template_without_the_bos_token(make_folder: MakeFolder) -> None:
    tokenizer = Tokenizer(make_folder(PLAIN))
    assert ids(tokenizer.encode_chat([USER])[0]) == of_text("u:ab;>")


def test_a_completion_gets_the_tokenizers_own_bos_token_once(make_folder: MakeFolder) -> None:
    tokenizer = Tokenizer(make_folder(PLAIN))
    assert ids(tokenizer.encode_completion(["ab"])[0]) == [BOS, *of_text("ab")]
    assert ids(tokenizer.encode_completion(["<s>ab"])[0]) == [BOS, *of_text("ab")]
    without = Tokenizer(make_folder(PLAIN, adds_bos=False))
    assert ids(without.encode_completion(["ab"])[0]) == of_text("ab")


def test_a_chat_equals_what_transformers_makes_of_it(make_folder: MakeFolder) -> None:
    from transformers import AutoTokenizer

    folder = make_folder(WITH_BOS)
    reference = AutoTokenizer.from_pretrained(str(folder))
    chat = [{"role": "system", "content": "x"}, *USER]
    expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids(Tokenizer(folder).encode_chat([chat])[0]) == list(expected)


def test_a_batch_equals_its_requests_one_by_one(make_folder: MakeFolder) -> None:
    tokenizer = Tokenizer(make_folder(PLAIN))
    prompts = ["a", "bcd", "", "e" * 1_000]
    assert [ids(one) for one in tokenizer.encode_completion(prompts)] == [
        ids(tokenizer.encode_completion([prompt])[0]) for prompt in prompts
    ]
    assert tokenizer.encode_completion([]) == []
    assert tokenizer.encode_chat([]) == []


def test_a_prompt_that_cannot_be_encoded_harms_no_other(make_folder: MakeFolder) -> None:
    tokenizer = Tokenizer(make_folder(PLAIN))
    encoded = tokenizer.encode_completion(["a", "\ud800", "b", "x\udfff", "c"])
    assert [ids(encoded[place]) for place in (0, 2, 4)] == [[BOS, *of_text(text)] for text in "abc"]
    for place in (1, 3):
        error = encoded[place]
        assert isinstance(error, RequestError)
        assert error.code is RequestErrorCode.TOKENIZER_FAILED


def test_a_prompt_without_tokens_is_an_error(make_folder: MakeFolder) -> None:
    error = Tokenizer(make_folder(PLAIN, adds_bos=False)).encode_completion([""])[0]
    assert isinstance(error, RequestError)
    assert error.code is RequestErrorCode.TOKENIZER_FAILED


def test_a_chat_that_its_template_refuses_harms_no_other(make_folder: MakeFolder) -> None:
    refuse = (
        "{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}"
        "{% endif %}"
    )
    tokenizer = Tokenizer(make_folder(refuse + PLAIN))
    encoded = tokenizer.encode_chat([USER, [{"role": "system", "content": "secret"}], USER])
    assert ids(encoded[0]) == ids(encoded[2]) == of_text("u:ab;>")
    error = encoded[1]
    assert isinstance(error, RequestError)
    assert error.code is RequestErrorCode.CHAT_TEMPLATE_FAILED
    assert "System role not supported" in error.message
    assert "secret" not in error.message


@pytest.mark.parametrize(
    "template", ["{{ messages[9].content.x }}", "{{ 1 / 0 }}", "{{ nothing() }}", "{{ '' }}"]
)
def test_a_template_that_fails_is_an_error_of_the_request(make_folder: MakeFolder, template: str) -> None:
    error = Tokenizer(make_folder(template)).encode_chat([USER])[0]
    assert isinstance(error, RequestError)
    assert error.code is RequestErrorCode.CHAT_TEMPLATE_FAILED


def test_a_model_without_a_template_says_what_to_do(make_folder: MakeFolder) -> None:
    with pytest.raises(RequestError, match="/v1/completions"):
        Tokenizer(make_folder(None)).render_chat(USER)


def test_template_kwargs_reach_the_template(make_folder: MakeFolder) -> None:
    tokenizer = Tokenizer(make_folder("{% if think %}T{% endif %}" + PLAIN))
    encoded = tokenizer.encode_chat([USER, USER], [{"think": True}, None])
    assert [ids(one) for one in encoded] == [of_text("Tu:ab;>"), of_text("u:ab;>")]


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "add_generation_prompt", "messages"])
def test_template_kwargs_cannot_replace_what_rendering_sets(make_folder: MakeFolder, name: str) -> None:
    with pytest.raises(RequestError, match=name):
        Tokenizer(make_folder(PLAIN)).render_chat(USER, {name: "x"})


def test_token_ids_are_held_to_the_vocabulary(make_folder: MakeFolder) -> None:
    tokenizer = Tokenizer(make_folder(PLAIN, vocab_size=300))
    assert ids(tokenizer.check_token_ids([0, 299])) == [0, 299]
    error = tokenizer.check_token_ids([0, 300])
    assert isinstance(error, RequestError)
    assert error.code is RequestErrorCode.TOKEN_OUT_OF_VOCABULARY


def test_nothing_is_truncated(make_folder: MakeFolder) -> None:
    assert len(ids(Tokenizer(make_folder(PLAIN)).encode_completion(["a" * 20_000])[0])) == 20_001


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="tokenizer"):
        Tokenizer(tmp_path)
