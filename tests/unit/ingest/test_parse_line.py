"""Every malformed line becomes its own error code, and good ones what they say."""

import json
from typing import Any

import msgspec
import pytest

from blend_core.errors import RequestError
from blend_core.errors import RequestErrorCode as Code
from flows.ingest.draft import Draft, Endpoint
from flows.ingest.parse import ParseOptions, is_blank, parse_line

OPTIONS = ParseOptions(model="m", default_max_tokens=77, max_line_bytes=20_000)
MESSAGES = [{"role": "user", "content": "Hi"}]


def line(body: Any = None, **fields: Any) -> bytes:
    whole = {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    whole.update(fields)
    return json.dumps({name: value for name, value in whole.items() if value is not ...}).encode()


def chat(**fields: Any) -> bytes:
    return line({"model": "m", "messages": MESSAGES, **fields})


def completion(**fields: Any) -> bytes:
    return line({"model": "m", "prompt": "Hi", **fields}, url="/v1/completions")


def parse(data: bytes, options: ParseOptions = OPTIONS) -> Draft:
    return parse_line(data, options)


def code_of(data: bytes, options: ParseOptions = OPTIONS) -> Code:
    with pytest.raises(RequestError) as caught:
        parse_line(data, options)
    assert caught.value.message.endswith(".")
    return caught.value.code


def error_of(data: bytes, options: ParseOptions = OPTIONS) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_line(data, options)
    return caught.value


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"{", Code.INVALID_JSON),
        (b"not json", Code.INVALID_JSON),
        (b'{"custom_id": NaN}', Code.INVALID_JSON),
        (b'{"custom_id": 1e999}', Code.INVALID_JSON),
        (b"9" * 5_000, Code.INVALID_JSON),
        (b"[" * 10_000, Code.INVALID_JSON),
        (b'{"a":' * 3_000, Code.INVALID_JSON),
        (b'{"a": "\x00"}', Code.INVALID_JSON),
        (b"{} {}", Code.INVALID_JSON),
        (b'{"custom_id": "\xff"}', Code.INVALID_ENCODING),
        ('{"custom_id": "ä"}'.encode("latin-1"), Code.INVALID_ENCODING),
        ('{"a": 1}'.encode("utf-16"), Code.INVALID_ENCODING),
        (b'{"custom_id": "\xed\xa0\x80"}', Code.INVALID_ENCODING),
        (b'{"custom_id": "\\ud800"}', Code.INVALID_ENCODING),
        (b'{"custom_id": "\\udc00 x"}', Code.INVALID_ENCODING),
        (b"[]", Code.NOT_AN_OBJECT),
        (b"null", Code.NOT_AN_OBJECT),
        (b'"text"', Code.NOT_AN_OBJECT),
        (b" " * 20_001, Code.LINE_TOO_LONG),
    ],
)
def test_a_line_that_cannot_be_read(data: bytes, code: Code) -> None:
    assert code_of(data) is code


@pytest.mark.parametrize(
    "custom_id", [..., None, 7, True, "", "a\x00b", "a\nb", "\x7f", "x" * 513, "ü" * 257, [], {}]
)
def test_a_custom_id_that_cannot_name_a_request(custom_id: Any) -> None:
    assert code_of(line({"messages": MESSAGES}, custom_id=custom_id)) is Code.INVALID_CUSTOM_ID


@pytest.mark.parametrize("custom_id", ["a", " ", "x" * 512, "Zeile 7 – 日本\u3000語", "🙂", "a/b#c\\d"])
def test_a_custom_id_is_kept_as_it_is(custom_id: str) -> None:
    assert parse(line({"messages": MESSAGES}, custom_id=custom_id)).custom_id == custom_id


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (line({"messages": MESSAGES}, method=...), Code.INVALID_METHOD),
        (line({"messages": MESSAGES}, method="GET"), Code.INVALID_METHOD),
        (line({"messages": MESSAGES}, method=["POST"]), Code.INVALID_METHOD),
        (line({"messages": MESSAGES}, url=...), Code.UNSUPPORTED_ENDPOINT),
        (line({"messages": MESSAGES}, url="/v4/chat/completions"), Code.UNSUPPORTED_ENDPOINT),
        (line({"messages": MESSAGES}, url={}), Code.UNSUPPORTED_ENDPOINT),
        (line({"input": "x"}, url="/v1/embeddings"), Code.EMBEDDINGS_NOT_SUPPORTED),
        (line({"messages": MESSAGES}, comment="x"), Code.UNSUPPORTED_FIELD),
        (line(...), Code.INVALID_BODY),
        (line(None), Code.INVALID_BODY),
        (line("text"), Code.INVALID_BODY),
        (line([]), Code.INVALID_BODY),
        (line({"prompt": "x"}), Code.UNSUPPORTED_FIELD),
        (line({"messages": MESSAGES}, url="/v1/completions"), Code.UNSUPPORTED_FIELD),
    ],
)
def test_an_envelope_at_fault(data: bytes, code: Code) -> None:
    assert code_of(data) is code


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        (..., Code.NO_PROMPT),
        (None, Code.NO_PROMPT),
        ([], Code.EMPTY_PROMPT),
        ([{"role": "user", "content": ""}], Code.EMPTY_PROMPT),
        ([{"role": "user", "content": " \n"}], Code.EMPTY_PROMPT),
        ([{"role": "user", "content": []}], Code.EMPTY_PROMPT),
        ("Hi", Code.INVALID_VALUE),
        ({"role": "user", "content": "Hi"}, Code.INVALID_VALUE),
        (["Hi"], Code.INVALID_VALUE),
        ([{"content": "Hi"}], Code.INVALID_VALUE),
        ([{"role": "robot", "content": "Hi"}], Code.INVALID_VALUE),
        ([{"role": {}, "content": "Hi"}], Code.INVALID_VALUE),
        ([{"role": "user"}], Code.INVALID_VALUE),
        ([{"role": "user", "content": None}], Code.INVALID_VALUE),
        ([{"role": "user", "content": 7}], Code.INVALID_VALUE),
        ([{"role": "user", "content": ["Hi"]}], Code.INVALID_VALUE),
        ([{"role": "user", "content": [{"type": "text"}]}], Code.INVALID_VALUE),
        ([{"role": "user", "content": "Hi", "name": 7}], Code.INVALID_VALUE),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            Code.UNSUPPORTED_VALUE,
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], Code.UNSUPPORTED_VALUE),
        ([{"role": "tool", "content": "4", "tool_call_id": "c"}], Code.UNSUPPORTED_VALUE),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], Code.UNSUPPORTED_FIELD),
        ([{"role": "user", "content": "Hi", "mood": "good"}], Code.UNSUPPORTED_FIELD),
        ([{"role": "user", "content": [{"type": "text", "text": "Hi", "cache": 1}]}], Code.UNSUPPORTED_FIELD),
    ],
)
def test_messages_at_fault(messages: Any, code: Code) -> None:
    assert code_of(chat(messages=messages) if messages is not ... else line({"model": "m"})) is code


def test_messages_reach_the_template_as_text() -> None:
    draft = parse(
        chat(
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c", "refusal": None, "name": "bob"},
                {"role": "user", "content": ""},
            ]
        )
    )
    assert draft.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "name": "bob"},
        {"role": "user", "content": ""},
    ]
    assert draft.endpoint is Endpoint.CHAT_COMPLETIONS
    assert draft.prompt is None
    assert draft.prompt_token_ids is None


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (None, Code.NO_PROMPT),
        ("", Code.EMPTY_PROMPT),
        ([], Code.EMPTY_PROMPT),
        ([""], Code.EMPTY_PROMPT),
        ([[]], Code.EMPTY_PROMPT),
        (["a", "b"], Code.UNSUPPORTED_VALUE),
        ([[1], [2]], Code.UNSUPPORTED_VALUE),
        (7, Code.INVALID_VALUE),
        ({"text": "a"}, Code.INVALID_VALUE),
        ([1, -1], Code.INVALID_VALUE),
        ([1, True], Code.INVALID_VALUE),
        ([1.0], Code.INVALID_VALUE),
        ([1, "a"], Code.INVALID_VALUE),
        ([2**31], Code.INVALID_VALUE),
    ],
)
def test_prompts_at_fault(prompt: Any, code: Code) -> None:
    assert code_of(completion(prompt=prompt)) is code


def test_every_form_of_prompt() -> None:
    assert parse(completion(prompt="\n")).prompt == "\n"
    assert parse(completion(prompt=["Hi"])).prompt == "Hi"
    assert parse(completion(prompt=[0, 5])).prompt_token_ids == [0, 5]
    assert parse(completion(prompt=[[0, 5]])).prompt_token_ids == [0, 5]


@pytest.mark.parametrize("value", [0, -1, 1.0, 5.5, "5", True, False, [], {}, 2**31, 10**40])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_at_fault(name: str, value: Any) -> None:
    assert code_of(chat(**{name: value})) is Code.INVALID_MAX_TOKENS


def test_max_tokens_absent_takes_the_jobs_default() -> None:
    assert parse(chat()).sampling.max_tokens == 77
    assert parse(chat(max_tokens=None)).sampling.max_tokens == 77
    assert parse(chat(max_completion_tokens=5)).sampling.max_tokens == 5
    assert parse(chat(max_completion_tokens=5, max_tokens=5)).sampling.max_tokens == 5
    assert code_of(chat(max_completion_tokens=5, max_tokens=6)) is Code.INVALID_MAX_TOKENS


def test_sampling_fields_take_effect() -> None:
    draft = parse(
        completion(
            max_tokens=9,
            min_tokens=2,
            temperature=0,
            top_p=0.5,
            top_k=-1,
            seed=-3,
            stop="END",
            ignore_eos=True,
        )
    )
    sampling = draft.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed, sampling.top_k) == (9, 2, -3, 0)
    assert (sampling.temperature, sampling.top_p, sampling.ignore_eos) == (0.0, 0.5, True)
    assert sampling.stop == ("END",)
    assert parse(chat(stop=["a", "b", "c", "d"])).sampling.stop == ("a", "b", "c", "d")
    assert parse(chat(chat_template_kwargs={"think": False})).template_kwargs == {"think": False}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, 2.1, "1", True, [], 10**40)),
        *(("top_p", value) for value in (0, -1, 1.01, "1")),
        *(("top_k", value) for value in (-2, 1.5, "5", True)),
        *(("seed", value) for value in (1.5, "1", True, 2**63)),
        *(("min_tokens", value) for value in (-1, 1.5, 78)),
        *(("stop", value) for value in ("", [""], [1], ["a"] * 5, {})),
        *(("ignore_eos", value) for value in (1, "true")),
        ("chat_template_kwargs", []),
        ("model", 7),
        ("model", "x" * 513),
    ],
)
def test_values_out_of_range_or_of_the_wrong_type(name: str, value: Any) -> None:
    assert code_of(chat(**{name: value})) is Code.INVALID_VALUE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("stream", value) for value in (True, 0)),
        *(("n", value) for value in (2, True, "1")),
        *(("logprobs", value) for value in (True, 1)),
        ("top_logprobs", 3),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "grammar"}),
        ("structured_outputs", {"regex": "a+"}),
        ("tool_choice", "auto"),
        ("modalities", ["text", "audio"]),
    ],
)
def test_values_that_are_not_supported(name: str, value: Any) -> None:
    assert code_of(chat(**{name: value})) is Code.UNSUPPORTED_VALUE


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"response_format": {"type": "json_object"}}, '{"type":"object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": [1]}}}},
            '{"a":[1]}',
        ),
        ({"structured_outputs": {"json": {"a": 1}}}, '{"a":1}'),
        ({"structured_outputs": {"json": '{"a": 1}'}}, '{"a":1}'),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_a_json_schema_is_read_in_either_form(fields: dict[str, Any], schema: str | None) -> None:
    assert parse(chat(**fields)).sampling.json_schema == schema


@pytest.mark.parametrize("schema", [[1], "no JSON", None, 3])
def test_a_json_schema_that_is_none_is_an_error(schema: object) -> None:
    shape = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert code_of(chat(response_format=shape)) is Code.INVALID_SCHEMA


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nonsense"}, "$.type: 'nonsense' is not valid"),
        ({"properties": {"age": {"minimum": "x"}}}, "$.properties.age.minimum: 'x' is not of type 'number'"),
        ({"$schema": 3}, "$['$schema']: 3 is not of type 'string'"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": "x"}, "$.minimum: 'x' is not"),
        ({"enum": "x" * 1000}, "…"),
    ],
)
def test_what_is_no_json_schema_is_told_with_its_place(schema: dict[str, Any], reason: str) -> None:
    error = error_of(chat(structured_outputs={"json": schema}))
    assert error.code is Code.INVALID_SCHEMA
    assert error.message.startswith("`structured_outputs.json` is no JSON schema: $")
    assert reason in error.message
    assert len(error.message) < 300


def test_a_pattern_that_another_engine_of_patterns_knows_is_let_through() -> None:
    schema = {"$schema": "https://example.org/own", "type": "string", "pattern": r"\p{L}("}
    assert parse(chat(structured_outputs={"json": schema})).sampling.json_schema is not None


def test_a_json_schema_is_bounded_in_depth_and_length() -> None:
    def nested(num_levels: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(num_levels - 1):
            schema = {"not": schema}
        return schema

    assert parse(chat(structured_outputs={"json": nested(64)})).sampling.json_schema is not None
    error = error_of(chat(structured_outputs={"json": nested(65)}))
    assert (error.code, "64 levels" in error.message) == (Code.INVALID_SCHEMA, True)
    long = {"enum": [str(value) for value in range(10_000)]}
    error = error_of(chat(structured_outputs={"json": long}), ParseOptions("m"))
    assert (error.code, "at most 65,536 are taken" in error.message) == (Code.INVALID_SCHEMA, True)


def test_a_schema_is_refused_where_the_engine_keeps_none() -> None:
    line = chat(response_format={"type": "json_object"})
    with pytest.raises(RequestError, match="the engine `vllm`"):
        parse_line(line, ParseOptions("m", keeps_schemas=False))


def test_an_adapter_is_named_by_itself_or_as_the_model_and_must_be_known() -> None:
    options = ParseOptions("m", strict_model=True, lora_adapters=frozenset({"support"}))
    assert parse_line(chat(lora_adapter="support"), options).lora_adapter == "support"
    assert parse_line(chat(model="support"), options).lora_adapter == "support"
    assert parse_line(chat(model="m"), options).lora_adapter is None
    with pytest.raises(RequestError) as caught:
        parse_line(chat(lora_adapter="sales"), options)
    assert caught.value.code is Code.UNKNOWN_LORA_ADAPTER


def test_template_arguments_of_the_job_yield_to_those_of_the_request() -> None:
    options = ParseOptions("m", chat_template_kwargs={"think": True, "style": "short"})
    draft = parse_line(chat(chat_template_kwargs={"think": False}), options)
    assert draft.template_kwargs == {"think": False, "style": "short"}


@pytest.mark.parametrize(
    ("name", "value"), [("echo", True), ("best_of", 2), ("suffix", "x"), ("logprobs", 0.5)]
)
def test_values_that_a_completion_does_not_support(name: str, value: Any) -> None:
    assert code_of(completion(**{name: value})) is Code.UNSUPPORTED_VALUE


@pytest.mark.parametrize(
    "name",
    [
        "tools",
        "functions",
        "function_call",
        "stream_options",
        "reasoning_effort",
        "thinking",
        "echo",
        "prompt",
        "",
    ],
)
def test_fields_that_are_not_supported(name: str) -> None:
    assert code_of(chat(**{name: [1]})) is Code.UNSUPPORTED_FIELD


def test_fields_without_effect_are_accepted() -> None:
    draft = parse(
        chat(
            user="u", metadata={"a": 1}, store=True, service_tier="flex", n=1, stream=False,
            logprobs=False, top_logprobs=0, presence_penalty=0, frequency_penalty=0.0, logit_bias={},
            parallel_tool_calls=True, response_format={"type": "text"}, tools=None, functions=None,
            temperature=None, tool_choice="none",
        )
    )  # fmt: skip
    assert msgspec.structs.replace(draft, body=b"") == msgspec.structs.replace(parse(chat()), body=b"")


def test_a_difference_of_model_is_an_error_only_when_strict() -> None:
    other = line({"model": "other", "messages": MESSAGES})
    assert parse(other).model == "other"
    strict = ParseOptions(model="m", strict_model=True)
    assert code_of(other, strict) is Code.MODEL_MISMATCH
    assert parse(chat(), strict).model == "m"
    assert parse(line({"messages": MESSAGES}), strict).model is None


def test_line_ends_byte_order_marks_and_spaces_do_not_disturb() -> None:
    good = parse(chat())
    for data in (chat() + b"\r", b"\xef\xbb\xbf" + chat(), b"  " + chat() + b" \t"):
        assert parse(data).messages == good.messages


@pytest.mark.parametrize("data", [b"", b"\r", b" \t", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r"])
def test_blank_lines(data: bytes) -> None:
    assert is_blank(data)
    assert not is_blank(b"x")
    assert not is_blank(b"\xef\xbb\xbf{}")


def test_nul_in_a_prompt_is_text() -> None:
    assert parse(completion(prompt="a\x00b")).prompt == "a\x00b"


def test_an_error_tells_what_was_valid_and_never_the_prompt() -> None:
    with pytest.raises(RequestError) as caught:
        parse(line({"model": "m", "messages": [{"role": "user", "content": "secret"}], "n": 3}))
    assert caught.value.ids == {"custom_id": "r-1", "endpoint": "/v1/chat/completions"}
    assert "secret" not in str(caught.value)


def test_the_body_is_the_line_as_it_came() -> None:
    data = b" " + chat(seed=3) + b"\r"
    assert parse(data).body == data
