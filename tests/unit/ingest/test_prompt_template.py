"""The key of a prompt template: equal where answers are likely to be alike, and it tells no prompt."""

import json
from typing import Any

import pytest

from flows.ingest.parse import ParseOptions, parse_line
from flows.ingest.template import RowTemplate, TemplateOptions

OPTIONS = ParseOptions("m", default_max_tokens=100)


def key(url: str = "/v1/chat/completions", **body: Any) -> str:
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    return parse_line(json.dumps(line).encode(), OPTIONS).prompt_template


def chat(user: str, system: str | None = None, role: str = "system", **body: Any) -> str:
    messages = [] if system is None else [{"role": role, "content": system}]
    return key(messages=[*messages, {"role": "user", "content": user}], **body)


def row_key(prompt: str = "Say {{ x }}", system: str | None = None, max_tokens: int = 100) -> str:
    template = RowTemplate(TemplateOptions(prompt, system, None, max_tokens, temperature=1.0))
    keys = {template.fill({"x": value}).prompt_template for value in ("one", "two")}
    (found,) = keys
    return found


def test_chats_of_one_system_message_are_one_template() -> None:
    assert chat("one", "Be brief.") == chat("another", "Be brief.") != chat("one", "Be long.")
    assert chat("one", "Be brief.") == chat("one", "Be brief.", role="developer")


def test_without_a_system_message_the_opening_tells() -> None:
    first, second = (f"Classify the review as good or bad: {text}" for text in ("Nice.", "Awful!"))
    assert chat(first) == chat(second) != chat("Summarise the review in a sentence: Nice.")
    assert chat(first) != chat(first, "Be brief.")


def test_completions_are_told_by_their_opening() -> None:
    url = "/v1/completions"
    assert key(url, prompt="Translate into French: a") != key(url, prompt="Translate into Greek: a")
    assert key(url, prompt=[*range(8), 50]) == key(url, prompt=[*range(8), 60]) != key(url, prompt=[1])


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 99},
        {"min_tokens": 5},
        {"stop": "\n"},
        {"ignore_eos": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_what_shapes_the_length_is_part_of_it(body: dict[str, Any]) -> None:
    assert chat("one", "Be brief.", **body) != chat("one", "Be brief.")


def test_what_does_not_shape_the_length_is_not() -> None:
    assert chat("one", "Be brief.", temperature=0.2, seed=4) == chat("one", "Be brief.", max_tokens=100)


def test_rows_are_told_by_the_templates_of_their_source() -> None:
    keys = [row_key(), row_key(prompt="Tell {{ x }}"), row_key(system="Be brief."), row_key(max_tokens=9)]
    assert len(set(keys)) == 4
    assert row_key() == keys[0]


def test_a_key_is_short_and_stays_the_same_from_night_to_night() -> None:
    assert chat("one", "Be brief.") == "49c25f0d3d906595"
