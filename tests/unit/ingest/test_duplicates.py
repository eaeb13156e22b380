"""A repeated custom_id is an error that names its first use."""

import pytest

from blend_core.errors import RequestError, RequestErrorCode, SourceError
from flows.ingest.draft import Draft, SourceItem
from flows.ingest.duplicates import DuplicateCheck
from flows.ingest.items import read_lines
from flows.ingest.parse import ParseOptions
from storage.object_lines import LineBatch


def items(uri: str, *lines: str) -> list[SourceItem]:
    batch = LineBatch(1, [line.encode() for line in lines])
    return next(iter(read_lines(uri, [batch], ParseOptions("m"))))


def good(custom_id: str) -> str:
    return f'{{"custom_id":"{custom_id}","method":"POST","url":"/v1/completions","body":{{"prompt":"Hi"}}}}'


def bad(custom_id: str) -> str:
    return good(custom_id).replace('"Hi"', '"Hi","n":2')


def test_later_uses_name_the_first_across_sources() -> None:
    check = DuplicateCheck(fail_job=False)
    first = check.apply(items("s3://b/one", "", good("a"), good("b"), good("a")))
    second = check.apply(items("s3://b/two", good("c"), good("b")))
    again = [item for item in first + second if isinstance(item.parsed, RequestError)]
    assert [(item.source_uri, item.source_line) for item in again] == [("s3://b/one", 4), ("s3://b/two", 2)]
    assert all(item.custom_id in ("a", "b") for item in again)
    for item, uri, line in zip(again, ["s3://b/one"] * 2, [2, 3], strict=True):
        assert isinstance(item.parsed, RequestError)
        assert item.parsed.code is RequestErrorCode.DUPLICATE_CUSTOM_ID
        assert f"line {line} of {uri}" in item.parsed.message


def test_an_id_of_a_bad_line_counts_and_a_bad_line_keeps_its_error() -> None:
    checked = DuplicateCheck(fail_job=False).apply(items("s3://b/k", bad("a"), good("a"), bad("a")))
    codes = [item.parsed.code if isinstance(item.parsed, RequestError) else None for item in checked]
    assert codes == ["unsupported_value", "duplicate_custom_id", "unsupported_value"]


def test_bad_ids_are_no_ids() -> None:
    checked = DuplicateCheck(fail_job=False).apply(items("s3://b/k", good(""), good(""), good("a")))
    assert [isinstance(item.parsed, Draft) for item in checked] == [False, False, True]


def test_a_job_may_ask_to_fail_instead() -> None:
    with pytest.raises(SourceError, match="line 1 of s3://b/k"):
        DuplicateCheck(fail_job=True).apply(items("s3://b/k", good("a"), good("a")))
