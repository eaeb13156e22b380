"""JSON schemas are checked as jsonschema's own check has it, in a time that grows as their length."""

import inspect
import sys
import time
from typing import Any
from urllib.parse import urljoin
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import FormatChecker
from jsonschema.exceptions import SchemaError
from jsonschema.validators import SPECIFICATIONS, validator_for

from blend_core.errors import RequestError, RequestErrorCode
from flows.ingest.json_schemas import MAX_SCHEMA_BYTES, read_json_schema

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
DRAFTS = [
    "http://json-schema.org/draft-03/schema#",
    DRAFT_4,
    "http://json-schema.org/draft-06/schema#",
    DRAFT_7,
    DRAFT_2019,
    "https://json-schema.org/draft/2020-12/schema",
]

# Few values, so that lists often repeat one.
items = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 1.0, "string", "object"]),
    lambda part: st.lists(part, max_size=2) | st.dictionaries(st.sampled_from("ab"), part, max_size=2),
    max_leaves=4,
)
lists = st.lists(items, max_size=4)
keywords = st.fixed_dictionaries({}, optional={"type": lists, "enum": lists, "required": lists})

# Right for some keywords and wrong for others, as they are and with a part that is no schema in them.
VALUES: list[Any] = [True, 1, "a", "#", {}, [], ["a"], {"type": 1}]
VALUES += [form for value in VALUES[1:] for form in ({"a": value}, [value])]


def keywords_of(draft: str) -> set[str]:
    """All that the draft knows, in whichever of its vocabularies."""
    schemas: list[Any] = [validator_for({"$schema": draft}).META_SCHEMA]
    schemas += [SPECIFICATIONS.contents(urljoin(draft, part["$ref"])) for part in schemas[0].get("allOf", ())]
    return {name for schema in schemas for name in schema["properties"]} - {"$schema"}


def plain_verdict(schema: dict[str, Any]) -> str | None:
    try:
        validator_for(schema).check_schema(schema, format_checker=FormatChecker(formats=()))
    except SchemaError as error:
        return f"{error.json_path}: {error.message}"
    return None


def verdict(schema: dict[str, Any]) -> str | None:
    try:
        read_json_schema("schema", schema)
    except RequestError as error:
        return error.message.removeprefix("`schema` is no JSON schema: ").removesuffix(".")
    return None


@given(st.sampled_from(DRAFTS), st.dictionaries(st.sampled_from(["properties", "not"]), keywords) | keywords)
def test_the_check_is_that_of_the_drafts_own(draft: str, schema: dict[str, Any]) -> None:
    schema = {"$schema": draft} | schema
    plain, own = plain_verdict(schema), verdict(schema)
    assert (own is None) == (plain is None)
    if own is not None and plain is not None:
        assert plain.startswith(own.removesuffix("…"))


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_keyword_is_checked_as_the_draft_has_it(draft: str) -> None:
    for name in sorted(keywords_of(draft)):
        for value in VALUES:
            schema = {"$schema": draft, name: value}
            assert (verdict(schema) is None) == (plain_verdict(schema) is None), schema


@pytest.mark.parametrize(
    ("schema", "is_valid"),
    [({"type": []}, False), ({"$schema": DRAFT_4, "enum": []}, True), ({"required": []}, False)],
)
def test_thousands_of_objects_in_a_list_are_checked_at_once(schema: dict[str, Any], is_valid: bool) -> None:
    name = next(name for name in schema if name != "$schema")
    schema = schema | {name: [{"a": number} for number in range(5_000)]}
    started_s = time.process_time()
    assert (verdict(schema) is None) == is_valid
    # Each compared with each takes half a minute and more.
    assert time.process_time() - started_s < 5


def test_a_schema_that_is_too_deep_for_what_is_left_of_the_stack_is_refused() -> None:
    schema: dict[str, Any] = {"$schema": DRAFT_2019}
    for _ in range(60):
        schema = {"$schema": DRAFT_2019, "not": schema}

    def read_at(level: int) -> str:
        return read_at(level - 1) if level else read_json_schema("schema", schema)

    num_frames = len(inspect.stack(0))
    with pytest.raises(RequestError, match="nested too deeply") as refused:
        # jsonschema takes several frames a level.
        read_at(sys.getrecursionlimit() - num_frames - 150)
    assert refused.value.code is RequestErrorCode.INVALID_SCHEMA
    assert read_at(0)


def test_the_longest_schema_is_checked_in_a_moment() -> None:
    schema = {"properties": {f"field_{number}": {"type": "string"} for number in range(2_100)}}
    started_s = time.process_time()
    assert len(read_json_schema("schema", schema)) > MAX_SCHEMA_BYTES * 0.9
    assert time.process_time() - started_s < 5


@pytest.mark.parametrize("draft", DRAFTS)
def test_lists_of_parts_are_checked_as_fast_by_every_draft(draft: str) -> None:
    schema = {"$schema": draft, "not": {"enum": [{"a": number} for number in range(5_000)]}}
    started_s = time.process_time()
    assert verdict(schema) is None
    assert time.process_time() - started_s < 5


def least_time_s(draft: str) -> float:
    """Best of several checks of thousands of parts; each is another schema, since verdicts are kept."""
    times_s = []
    for _ in range(5):
        schema = {"$schema": draft, "title": str(uuid4()), "anyOf": [{}] * 4_000}
        started_s = time.process_time()
        assert verdict(schema) is None
        times_s.append(time.process_time() - started_s)
    return min(times_s)


@pytest.mark.parametrize("draft", DRAFTS[1:])
def test_every_draft_is_checked_as_fast_as_one_without_vocabularies(draft: str) -> None:
    # Against each vocabulary by itself it takes 13 times as long.
    assert least_time_s(draft) < 4 * least_time_s(DRAFT_7)


@pytest.mark.parametrize("address", ["http://[", "https://[json-schema.org]/draft", "http://a\uff03b"])
def test_an_address_of_no_kind_of_schema_is_that_requests_fault(address: str) -> None:
    with pytest.raises(RequestError, match=r"its `\$schema` is no address") as raised:
        read_json_schema("schema", {"$schema": address, "type": "object"})
    assert raised.value.code is RequestErrorCode.INVALID_SCHEMA


def test_what_yaml_can_write_and_json_cannot_is_no_schema() -> None:
    itself: dict[str, Any] = {"type": "object"}
    itself["properties"] = itself
    for schema in ({"properties": {None: {"type": "string"}}}, itself):
        with pytest.raises(RequestError, match="names must be texts, and no part may hold itself"):
            read_json_schema("schema", schema)
