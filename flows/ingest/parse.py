"""One line of an OpenAI Batch file to a `Draft`, or to a `RequestError` that says what is wrong with it."""

import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from blend_core.errors import RequestError, RequestErrorCode
from blend_core.request import SamplingParams
from flows.ingest.draft import Draft, Endpoint
from flows.ingest.fields import RULES_BY_ENDPOINT, Effect
from flows.ingest.prompt_template import chat_key, completion_key
from flows.ingest.prompts import quoted
from flows.ingest.values import invalid_value

MAX_CUSTOM_ID_BYTES = 512
"""Longest `custom_id` in UTF-8: what an index entry of the database holds."""

_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}
_LINE_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# What `_read_body` asks of a rule for every field of every line, ready to unpack.
_READERS = {
    endpoint: {name: (rule.read, rule.effect is Effect.READ) for name, rule in rules.items()}
    for endpoint, rules in RULES_BY_ENDPOINT.items()
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """What parsing needs to know of the job.

    Attributes:
        model: the job's model.
        strict_model: a request that asks for another model is at fault.
        default_max_tokens: of a request that does not say.
        max_line_bytes: longest line that is read.
        chat_template_kwargs: variables of the chat template, for requests that do not set them.
        keeps_schemas: the engine can keep answers to a JSON schema; where not, asking for it is a fault.
        lora_adapters: names that a request may ask for; None leaves them unchecked.
    """

    model: str
    strict_model: bool = False
    default_max_tokens: int = 256
    max_line_bytes: int = 8 << 20
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    keeps_schemas: bool = True
    lora_adapters: frozenset[str] | None = None


def is_blank(line: bytes) -> bool:
    """Whether a line holds nothing: such lines are skipped and not counted."""
    if line.startswith(b"{"):
        return False  # nearly every line
    return (
        not line
        or line.isspace()
        or line.removeprefix(_BYTE_ORDER_MARK).isspace()
        or line == _BYTE_ORDER_MARK
    )


def parse_line(line: bytes, options: ParseOptions) -> Draft:
    """Parse and validate one non-blank line.

    Args:
        line: without its line end; a carriage return and a byte order mark do not disturb. Of a line over
            the limit only the beginning need be there, as long as it is over the limit itself.
        options: of the job.

    Raises:
        RequestError: what is wrong; `ids` hold `custom_id`, `endpoint` and `model` as far as they are valid.
    """
    if len(line) > options.max_line_bytes:
        raise RequestError(
            f"The line is longer than {options.max_line_bytes} bytes.", RequestErrorCode.LINE_TOO_LONG
        )
    return parse_fields(decode_object(line), line, options)


def parse_fields(fields: dict[str, Any], line: bytes, options: ParseOptions) -> Draft:
    """Validate the fields of a request; `line` is the JSON that they came of.

    Raises:
        RequestError: what is wrong; `ids` hold `custom_id`, `endpoint` and `model` as far as they are valid.
    """
    known: dict[str, str | int] = {}
    try:
        custom_id = check_custom_id(fields.get("custom_id"))
        known["custom_id"] = custom_id
        endpoint = _check_envelope(fields)
        known["endpoint"] = endpoint.value
        body = fields.get("body")
        if not isinstance(body, dict):
            raise RequestError("The line has no `body` that is an object.", RequestErrorCode.INVALID_BODY)
        values = _read_body(body, endpoint)
        model = values.get("model")
        if model is not None:
            known["model"] = model
            is_adapter = model in (options.lora_adapters or ())
            if options.strict_model and model != options.model and not is_adapter:
                raise RequestError(
                    f"The request asks for another model than the job's, {options.model}.",
                    RequestErrorCode.MODEL_MISMATCH,
                )
        return _draft(custom_id, endpoint, values, options, line)
    except RequestError as error:
        error.ids.update(known)
        raise


def check_custom_id(custom_id: object) -> str:
    """The `custom_id` as it is, if it may name a request.

    Raises:
        RequestError: it is missing, no string, empty, too long or has control characters.
    """
    if isinstance(custom_id, str) and custom_id and _has_no_control(custom_id):
        num_bytes = len(custom_id) if custom_id.isascii() else len(custom_id.encode())
        if num_bytes <= MAX_CUSTOM_ID_BYTES:
            return custom_id
    if custom_id is None:
        reason = "`custom_id` is missing."
    elif not isinstance(custom_id, str):
        reason = "`custom_id` must be a string."
    elif not custom_id:
        reason = "`custom_id` is empty."
    elif not _has_no_control(custom_id):
        reason = "`custom_id` has control characters."
    else:
        reason = f"`custom_id` is longer than {MAX_CUSTOM_ID_BYTES} bytes."
    raise RequestError(reason, RequestErrorCode.INVALID_CUSTOM_ID)


def _has_no_control(text: str) -> bool:
    # Printable is the fast answer for nearly all; spaces of other scripts are not "printable", yet allowed.
    return text.isprintable() or not any(unicodedata.category(char) in ("Cc", "Cs") for char in text)


def decode_object(text: bytes, what: str = "line") -> dict[str, Any]:
    """The JSON object of a line, or of a part of it that `what` names.

    Raises:
        RequestError: it is not UTF-8, no JSON, or no object.
    """
    try:
        fields = _decode(text.removeprefix(_BYTE_ORDER_MARK))
    except (msgspec.DecodeError, RecursionError) as error:
        raise _decode_error(text, what, error) from None
    if not isinstance(fields, dict):
        raise RequestError(f"The {what} is JSON, but not an object.", RequestErrorCode.NOT_AN_OBJECT)
    return fields


def _decode_error(text: bytes, what: str, error: Exception) -> RequestError:
    if isinstance(error, RecursionError):
        return RequestError(f"The {what} is nested too deeply.", RequestErrorCode.INVALID_JSON)
    try:
        text.decode()
    except UnicodeDecodeError as bad:
        return RequestError(f"The {what} is not UTF-8 (byte {bad.start}).", RequestErrorCode.INVALID_ENCODING)
    if _has_half_surrogates(text):
        return RequestError(
            f"The {what} escapes half of a surrogate pair, which is no character.",
            RequestErrorCode.INVALID_ENCODING,
        )
    # msgspec's messages name a place and a kind of fault, never the text.
    reason = str(error).removeprefix("JSON is malformed: ")
    return RequestError(f"The {what} is not JSON: {reason}.", RequestErrorCode.INVALID_JSON)


def _has_half_surrogates(line: bytes) -> bool:
    if not _ESCAPED_SURROGATE.search(line):
        return False
    try:
        json.dumps(json.loads(line), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def _check_envelope(fields: dict[str, Any]) -> Endpoint:
    method = fields.get("method")
    if method != "POST":
        raise RequestError("`method` must be POST.", RequestErrorCode.INVALID_METHOD)
    url = fields.get("url")
    endpoint = _ENDPOINTS.get(url) if isinstance(url, str) else None
    if endpoint is None:
        if url == "/v1/embeddings":
            raise RequestError("Embeddings are not supported.", RequestErrorCode.EMBEDDINGS_NOT_SUPPORTED)
        raise RequestError(
            f"`url` must be one of {', '.join(_ENDPOINTS)}.", RequestErrorCode.UNSUPPORTED_ENDPOINT
        )
    if not fields.keys() <= _LINE_FIELDS:
        unknown = min(fields.keys() - _LINE_FIELDS)
        raise RequestError(
            f"The line has the unknown field {quoted(unknown)}.", RequestErrorCode.UNSUPPORTED_FIELD
        )
    return endpoint


def _read_body(body: dict[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """The values of the fields that have an effect, by name; null counts as absent."""
    readers = _READERS[endpoint]
    values: dict[str, Any] = {}
    for name, value in body.items():
        reader = readers.get(name)
        if reader is None:
            raise RequestError(
                f"The body has the field {quoted(name)}, which {endpoint} does not support.",
                RequestErrorCode.UNSUPPORTED_FIELD,
            )
        if value is None:
            continue
        read, has_effect = reader
        used = read(name, value)
        if has_effect:
            values[name] = used
    return values


def _draft(
    custom_id: str, endpoint: Endpoint, values: dict[str, Any], options: ParseOptions, line: bytes
) -> Draft:
    messages = values.get("messages")
    prompt = values.get("prompt")
    sampling = _sampling(values, options)
    template_kwargs = {**options.chat_template_kwargs, **values.get("chat_template_kwargs", {})}
    lora_adapter = lora_adapter_of(values, options)
    if messages is not None:
        prompt_template = chat_key(endpoint.value, messages, template_kwargs, sampling)
    elif prompt is not None:
        prompt_template = completion_key(endpoint.value, prompt, sampling)
    else:
        field = "messages" if endpoint is Endpoint.CHAT_COMPLETIONS else "prompt"
        raise RequestError(f"The body has no `{field}`.", RequestErrorCode.NO_PROMPT)
    return Draft(
        custom_id=custom_id,
        endpoint=endpoint,
        model=values.get("model"),
        messages=messages,
        template_kwargs=template_kwargs,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=prompt if isinstance(prompt, list) else None,
        sampling=sampling,
        body=line,
        prompt_template=prompt_template,
        lora_adapter=lora_adapter,
    )


def lora_adapter_of(values: Mapping[str, Any], options: ParseOptions) -> str | None:
    """The adapter that a request names by itself, or as its model, as vLLM's own server takes it.

    Raises:
        RequestError: UNKNOWN_LORA_ADAPTER: the job has none of that name.
    """
    known, named, model = options.lora_adapters, values.get("lora_adapter"), values.get("model")
    if named is None:
        return model if known is not None and model in known else None
    if known is not None and named not in known:
        raise RequestError(
            f"The job has no LoRA adapter {quoted(named)}; name it in `options.vllm.lora_adapters`.",
            RequestErrorCode.UNKNOWN_LORA_ADAPTER,
        )
    return str(named)


def json_schema_of(values: Mapping[str, Any], options: ParseOptions) -> str | None:
    """The JSON schema that a request asks for in either form.

    Raises:
        RequestError: the forms differ, or the engine keeps no answer to a schema.
    """
    schema, other = values.get("response_format"), values.get("structured_outputs")
    if schema is not None and other is not None and schema != other:
        raise invalid_value("`response_format` and `structured_outputs` differ; give one of them.")
    schema = schema or other
    if schema is not None and not options.keeps_schemas:
        raise RequestError(
            "Answers by a JSON schema need the engine `vllm`, and this job runs on `torch`.",
            RequestErrorCode.UNSUPPORTED_VALUE,
        )
    return schema


def _sampling(values: dict[str, Any], options: ParseOptions) -> SamplingParams:
    max_tokens = values.get("max_tokens")
    newer_name = values.get("max_completion_tokens")
    if max_tokens is not None and newer_name is not None and max_tokens != newer_name:
        raise RequestError(
            "`max_tokens` and `max_completion_tokens` differ; give one of them.",
            RequestErrorCode.INVALID_MAX_TOKENS,
        )
    max_tokens = max_tokens or newer_name or options.default_max_tokens
    min_tokens = values.get("min_tokens", 0)
    if min_tokens > max_tokens:
        raise invalid_value(f"`min_tokens` is more than the {max_tokens} of `max_tokens`.")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=values.get("temperature", 1.0),
        top_p=values.get("top_p", 1.0),
        top_k=values.get("top_k", 0),
        seed=values.get("seed"),
        stop=values.get("stop", ()),
        ignore_eos=values.get("ignore_eos", False),
        json_schema=json_schema_of(values, options),
    )
