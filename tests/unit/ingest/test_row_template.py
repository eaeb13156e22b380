"""A row becomes a chat request, or an error row that names the column."""

import datetime
import json
import uuid
from decimal import Decimal
from typing import Any

import pytest

from blend_core.errors import ConfigurationError, RequestError, SourceError
from blend_core.errors import RequestErrorCode as Code
from flows.ingest.parse import ParseOptions, parse_line
from flows.ingest.template import RowTemplate, TemplateOptions


def template(prompt: str, system: str | None = None, id_column: str | None = "id") -> RowTemplate:
    return RowTemplate(TemplateOptions(prompt, system, id_column, max_tokens=9, temperature=0.5))


def text(prompt: str, **row: Any) -> str:
    draft = template(prompt).fill({"id": 1, **row})
    assert draft.messages is not None
    return str(draft.messages[-1]["content"])


def failure(prompt: str, **row: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        template(prompt).fill({"id": 1, **row})
    return caught.value


def test_a_row_becomes_a_chat_request() -> None:
    draft = template("Summarise: {{ body }}", "You serve {{ tenant }}.").fill(
        {"id": 7, "body": "x", "tenant": "A"}
    )
    assert draft.custom_id == "7"
    assert draft.messages == [
        {"role": "system", "content": "You serve A."},
        {"role": "user", "content": "Summarise: x"},
    ]
    assert (draft.sampling.max_tokens, draft.sampling.temperature) == (9, 0.5)


@pytest.mark.parametrize("tag", [
    "{% include 'x' %}",
    "{% if body %}{% include body ignore missing %}{% endif %}",
    "{% import 'x' as x %}",
    "{% from 'x' import y %}",
    "{% extends 'x' %}",
])  # fmt: skip
def test_a_template_that_needs_another_one_is_refused_before_any_row(tag: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"`prompt` template is not valid \(line 2\): there are no other"
    ):
        template(f"Hi\n{tag}")


def test_its_body_is_a_request_line_that_parses_to_the_same_request() -> None:
    draft = template("Hi {{ name }}").fill({"id": "a", "name": 'Zoë "Z"\n'})
    parsed = parse_line(draft.body, ParseOptions(model="m"))
    assert (parsed.custom_id, parsed.messages, parsed.sampling) == (
        draft.custom_id,
        draft.messages,
        draft.sampling,
    )


def test_every_row_asks_for_the_format_and_the_adapter_of_its_source() -> None:
    asked = {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a", "b"]}}},
        "lora_adapter": "support",
    }
    draft = RowTemplate(TemplateOptions("Hi {{ id }}", None, "id", 9, 0.5, **asked)).fill({"id": 1})
    assert (draft.sampling.json_schema, draft.lora_adapter) == ('{"enum":["a","b"]}', "support")
    parsed = parse_line(draft.body, ParseOptions(model="m"))
    assert (parsed.sampling, parsed.lora_adapter) == (draft.sampling, "support")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (Decimal("1.50"), "1.50"),
        (Decimal("0.0000001"), "0.0000001"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC), "2026-01-02T03:04:00+00:00"),
        (datetime.time(3, 4), "03:04:00"),
        (True, "true"),
        (3, "3"),
        (0.1, "0.1"),
        ({"a": [1, "ä"]}, '{"a":[1,"ä"]}'),
        (["x", None], '["x",null]'),
        (b"abc", "abc"),
        (memoryview(b"abc"), "abc"),
        (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        ("{{ id }}", "{{ id }}"),
    ],
)
def test_values_are_written_as_people_write_them(value: Any, written: str) -> None:
    assert text("{{ value }}", value=value) == written


def test_null_can_be_dealt_with() -> None:
    assert text("{{ note | default('none') }}", note=None) == "none"
    assert text("{{ note or 'none' }}", note=None) == "none"
    assert text("{% if note %}yes{% else %}no{% endif %}", note=None) == "no"
    assert text("{% if note is none %}null{% endif %}", note=None) == "null"
    assert text("{% if note is defined %}yes{% else %}no{% endif %}", note=None) == "no"


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("{{ absent }}", "no column 'absent'"),
        ("{% if absent %}{% endif %}", "no column 'absent'"),
        ("{{ note }}", "'note' is NULL"),
        ("{{ note + 'x' }}", "'note' is NULL"),
        ("{{ note | upper }}", "'note' is NULL"),
        ("{{ blob }}", "'blob' holds bytes"),
        ("{{ body.field }}", "field"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ body.__class__.__mro__ }}", "unsafe"),
        ("{{ data.append(1) }}", "unsafe"),
        ("{{ 'x' * 10 ** 9 }}", "repetition|power"),
        ("{{ 10 ** 10 ** 10 }}", "power"),
        ("{{ '%99999999d' % 1 }}", "format"),
        ("{% for i in range(99999) %}{{ body * 1000 }}{% endfor %}", "longer than"),
    ],
)
def test_what_fails_names_its_reason_and_never_the_text(prompt: str, named: str) -> None:
    error = failure(prompt, note=None, blob=b"\xff", body="secret", data=[1])
    assert error.code is Code.TEMPLATE_FAILED
    assert any(part in error.message for part in named.split("|"))
    assert "secret" not in error.message
    assert error.ids == {"custom_id": "1", "endpoint": "/v1/chat/completions"}


def test_text_that_is_not_unicode_fails() -> None:
    assert failure("{{ body }}", body="\ud800").code is Code.TEMPLATE_FAILED


def test_nothing_rendered_is_an_empty_prompt() -> None:
    assert failure(" {{ body }} ", body="").code is Code.EMPTY_PROMPT


@pytest.mark.parametrize("value", [None, "", "a\x00b", "x" * 600])
def test_an_id_that_cannot_name_a_request(value: Any) -> None:
    assert failure("x", id=value).code is Code.INVALID_CUSTOM_ID


def test_a_query_may_have_no_ids() -> None:
    assert template("x", id_column=None).fill({"a": 1}).custom_id is None
    assert json.loads(template("x", id_column=None).fill({"a": 1}).body)["custom_id"] is None


@pytest.mark.parametrize("source", ["{{ a", "{% foo %}", "{{ a | nofilter }}", "{{" + "(" * 5_000])
def test_a_template_with_a_fault_of_syntax_is_refused_at_once(source: str) -> None:
    with pytest.raises(ConfigurationError, match="`prompt` template"):
        template(source)
    with pytest.raises(ConfigurationError, match="`system` template"):
        template("x", system=source)


def test_a_query_without_the_id_column_is_refused() -> None:
    template("x").check_columns(["id", "body"])
    with pytest.raises(SourceError, match="'id'"):
        template("x").check_columns(["key", "body"])
