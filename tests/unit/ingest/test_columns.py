"""A row whose columns are the fields of a request line: the same rules as for a line."""

import json
from decimal import Decimal
from typing import Any

import pytest

from blend_core.errors import RequestError, SourceError
from blend_core.errors import RequestErrorCode as Code
from flows.ingest.columns import check_table, parse_columns
from flows.ingest.parse import ParseOptions, parse_line

OPTIONS = ParseOptions("tiny", max_line_bytes=2_000)
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}


def row(**change: Any) -> dict[str, Any]:
    fields = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": json.dumps(BODY)}
    return fields | change


def test_a_row_is_the_request_that_its_line_would_be() -> None:
    draft = parse_columns(row(), OPTIONS)
    again = parse_line(draft.body, OPTIONS)
    assert (draft.messages, draft.sampling, draft.custom_id) == (again.messages, again.sampling, "a")


def test_a_struct_is_a_body_in_which_null_is_absent() -> None:
    body = BODY | {"messages": [{"role": "user", "content": "Hi", "name": None}], "top_p": None}
    draft = parse_columns(row(body=body), OPTIONS)
    assert json.loads(draft.body)["body"] == BODY
    assert draft.sampling.max_tokens == 5


def test_text_may_come_as_bytes_and_ids_as_numbers() -> None:
    draft = parse_columns(row(custom_id=7, method=b"POST", body=json.dumps(BODY).encode()), OPTIONS)
    assert draft.custom_id == "7"
    assert parse_columns(row(custom_id=Decimal("1.50")), OPTIONS).custom_id == "1.50"


@pytest.mark.parametrize(("change", "code"), [
    ({"custom_id": None}, Code.INVALID_CUSTOM_ID),
    ({"custom_id": b"\xff"}, Code.INVALID_CUSTOM_ID),
    ({"method": None}, Code.INVALID_METHOD),
    ({"url": "/v1/else"}, Code.UNSUPPORTED_ENDPOINT),
    ({"body": None}, Code.INVALID_BODY),
    ({"body": "{nope"}, Code.INVALID_JSON),
    ({"body": "[1]"}, Code.NOT_AN_OBJECT),
    ({"body": '{}, "url": "x"'}, Code.INVALID_JSON),
    ({"body": b"\xff"}, Code.INVALID_ENCODING),
    ({"body": BODY | {"temperature": float("nan")}}, Code.INVALID_VALUE),
    ({"body": BODY | {"max_tokens": 5.0}}, Code.INVALID_MAX_TOKENS),
    ({"body": json.dumps(BODY | {"user": "x" * 2_000})}, Code.LINE_TOO_LONG),
])  # fmt: skip
def test_a_bad_row_has_a_code_and_keeps_its_id(change: dict[str, Any], code: Code) -> None:
    with pytest.raises(RequestError) as caught:
        parse_columns(row(**change), OPTIONS)
    assert caught.value.code is code
    if "custom_id" not in change:
        assert caught.value.ids["custom_id"] == "a"


def test_a_table_of_other_columns_is_told_to_need_a_template() -> None:
    check_table(("extra", "custom_id", "method", "url", "body"), "s3://b/t")
    with pytest.raises(SourceError, match=r"without the column `custom_id`.*prompt template"):
        check_table(("id", "text"), "s3://b/t")
