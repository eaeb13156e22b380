"""Prompts and answers are fitted into the model's context, to the token."""

import json
from pathlib import Path
from typing import Any

import pytest

from blend_core.errors import RequestError, RequestErrorCode
from blend_core.request import Request
from blend_core.tokenizing import Tokenizer
from flows.ingest.duplicates import DuplicateCheck
from flows.ingest.ingest import NumberedItem, number_items
from flows.ingest.items import read_lines
from flows.ingest.parse import ParseOptions
from storage.object_lines import LineBatch

MAX_MODEL_LEN = 10


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(model_folder)


def number(tokenizer: Tokenizer, *bodies: dict[str, Any]) -> list[NumberedItem]:
    lines = [
        json.dumps(
            {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body}
        ).encode()
        for index, body in enumerate(bodies)
    ]
    # One line a batch: numbers go on from batch to batch.
    batches = read_lines(
        "s3://b/k", [LineBatch(n, [line]) for n, line in enumerate(lines, 1)], ParseOptions("m")
    )
    return [
        one
        for batch in number_items(
            batches, tokenizer, DuplicateCheck(fail_job=False), max_model_len=MAX_MODEL_LEN
        )
        for one in batch
    ]


def test_a_prompt_must_leave_room_for_one_token(tokenizer: Tokenizer) -> None:
    fits, too_long = number(tokenizer, {"prompt": [5] * 9}, {"prompt": [5] * 10})
    assert isinstance(fits.outcome, Request)
    assert fits.outcome.sampling.max_tokens == 1
    assert isinstance(too_long.outcome, RequestError)
    assert too_long.outcome.code is RequestErrorCode.PROMPT_TOO_LONG
    assert "10 tokens" in too_long.outcome.message
    assert [fits.seq, too_long.seq] == [0, 1]


def test_max_tokens_is_cut_to_the_room_and_not_beyond(tokenizer: Tokenizer) -> None:
    cut, kept = number(tokenizer, {"prompt": [5] * 4, "max_tokens": 99}, {"prompt": [5] * 4, "max_tokens": 6})
    for one in (cut, kept):
        assert isinstance(one.outcome, Request)
        assert one.outcome.sampling.max_tokens == 6


def test_min_tokens_need_room_too(tokenizer: Tokenizer) -> None:
    body = {"prompt": [5] * 4, "max_tokens": 99}
    fits, too_long = number(tokenizer, {**body, "min_tokens": 6}, {**body, "min_tokens": 7})
    assert isinstance(fits.outcome, Request)
    assert (fits.outcome.sampling.min_tokens, fits.outcome.sampling.max_tokens) == (6, 6)
    assert isinstance(too_long.outcome, RequestError)
    assert too_long.outcome.code is RequestErrorCode.PROMPT_TOO_LONG


def test_kinds_of_prompts_keep_their_order(tokenizer: Tokenizer) -> None:
    lines = [
        b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"Hi"}}',
        b'{"custom_id":"b","method":"POST","url":"/v1/chat/completions","body":{"messages":'
        b'[{"role":"user","content":"x"}],"chat_template_kwargs":{"tokenize":true}}}',
        b'{"custom_id":"c","method":"POST","url":"/v1/completions","body":{"prompt":[7]}}',
        b'{"custom_id":"d","method":"POST","url":"/v1/chat/completions","body":{"messages":'
        b'[{"role":"user","content":"x"}]}}',
        b'{"custom_id":"e","method":"POST","url":"/v1/completions","body":{"prompt":"So"}}',
    ]
    batches = read_lines("s3://b/k", [LineBatch(1, lines)], ParseOptions("m"))
    (numbered,) = number_items(batches, tokenizer, DuplicateCheck(fail_job=False), max_model_len=100)
    texts = tokenizer.encode_completion(["Hi", "So"])
    chat = tokenizer.encode_chat([[{"role": "user", "content": "x"}]])[0]
    expected = [texts[0], None, [7], chat, texts[1]]
    for one, ids in zip(numbered, expected, strict=True):
        if ids is None:
            assert isinstance(one.outcome, RequestError)
            assert one.outcome.code is RequestErrorCode.CHAT_TEMPLATE_FAILED
        else:
            assert isinstance(one.outcome, Request)
            assert list(one.outcome.prompt_token_ids) == list(ids)  # type: ignore[arg-type]
