"""Whatever a line holds, the answer is a draft that can be used or a RequestError."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from blend_core.errors import RequestError
from flows.ingest.fields import FIELD_RULES
from flows.ingest.parse import ParseOptions, is_blank, parse_line

OPTIONS = ParseOptions(model="m", max_line_bytes=100_000)
FIELDS = [rule.name for rule in FIELD_RULES]
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["user", "text", "POST"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=5) | st.sampled_from(["role", "content", "type", "text"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


def check(data: bytes) -> None:
    if is_blank(data):
        return
    try:
        draft = parse_line(data, OPTIONS)
    except RequestError as error:
        error.message.encode()
        return
    prompts = [draft.messages, draft.prompt, draft.prompt_token_ids]
    assert sum(prompt is not None for prompt in prompts) == 1
    assert draft.sampling.max_tokens >= 1
    assert 0 <= draft.sampling.min_tokens <= draft.sampling.max_tokens
    assert 0.0 <= draft.sampling.temperature <= 2.0
    for message in draft.messages or []:
        message["content"].encode()
    (draft.prompt or "").encode()


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    check(data)


@given(JSON_VALUES)
def test_any_json(value: object) -> None:
    check(json.dumps(value).encode())


@settings(max_examples=300)
@given(
    url=st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    prompt=JSON_VALUES | st.just("Hi") | st.lists(st.integers(0, 99), max_size=3),
    messages=JSON_VALUES | st.just([{"role": "user", "content": "Hi"}]),
    fields=st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=4),
)
def test_any_values_of_known_fields(
    url: str, prompt: object, messages: object, fields: dict[str, object]
) -> None:
    body = {"prompt": prompt} if url == "/v1/completions" else {"messages": messages}
    line = {"custom_id": "a", "method": "POST", "url": url, "body": {**body, **fields}}
    check(json.dumps(line).encode())


@given(st.data())
def test_a_good_line_with_a_few_bytes_changed(data: st.DataObject) -> None:
    body = {"messages": [{"role": "user", "content": "Hi ä 🙂"}], "max_tokens": 5, "stop": ["x"]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    mutable = bytearray(json.dumps(line, ensure_ascii=False).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(mutable) - 1))
        mutable[place] = data.draw(st.integers(0, 255))
    check(bytes(mutable))
