"""Readers of single values of a body: right type and range, or a `RequestError` that names the field.

JSON's `true` is never a number here, and a whole number written as `1.0` is not an integer.
"""

from collections.abc import Callable
from typing import Any

from blend_core.errors import RequestError, RequestErrorCode
from flows.ingest.json_schemas import read_json_schema
from flows.numbers import MAX_TOKENS

_MAX_MODEL_CHARS = 512
_MAX_STOP_STRINGS = 4


def invalid_value(message: str) -> RequestError:
    """The error of a value that has the wrong type or lies out of range."""
    return RequestError(message, RequestErrorCode.INVALID_VALUE)


def read_model(name: str, value: object) -> str:
    """The name of a model."""
    if not isinstance(value, str) or len(value) > _MAX_MODEL_CHARS:
        raise invalid_value(f"`{name}` must be a string of at most {_MAX_MODEL_CHARS} characters.")
    return value


def read_bool(name: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise invalid_value(f"`{name}` must be true or false.")
    return value


def read_object(name: str, value: object) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise invalid_value(f"`{name}` must be an object.")
    return value


def read_int(low: int, high: int) -> Callable[[str, object], int]:
    """A reader of integers from `low` to `high`."""

    def read(name: str, value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise invalid_value(f"`{name}` must be an integer from {low} to {high}.")
        return value

    return read


def read_number(low: float, high: float) -> Callable[[str, object], float]:
    """A reader of numbers from `low` to `high`."""

    def read(name: str, value: object) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise invalid_value(f"`{name}` must be a number from {low:g} to {high:g}.")
        return float(value)

    return read


def read_top_p(name: str, value: object) -> float:
    """A nucleus mass: above 0, at most 1."""
    mass = read_number(0.0, 1.0)(name, value)
    if mass == 0.0:
        raise invalid_value(f"`{name}` must be above 0.")
    return mass


def read_top_k(name: str, value: object) -> int:
    """A number of candidates; -1 means all of them, as 0 does."""
    return max(read_int(-1, 2**31 - 1)(name, value), 0)


def read_max_tokens(name: str, value: object) -> int:
    """An upper bound of output tokens, at least 1."""
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise RequestError(
            f"`{name}` must be an integer from 1 to {MAX_TOKENS}; leave it out for the job's default.",
            RequestErrorCode.INVALID_MAX_TOKENS,
        )
    return value


def read_response_format(name: str, value: object) -> str | None:
    """The JSON schema, as JSON, that `response_format` asks for; None where it asks for text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return '{"type":"object"}'
    if kind != "json_schema" or not isinstance(value, dict):
        raise RequestError(
            f"`{name}` must be an object whose `type` is text, json_object or json_schema.",
            RequestErrorCode.UNSUPPORTED_VALUE,
        )
    described = value.get("json_schema")
    return read_json_schema(
        f"{name}.json_schema.schema", described.get("schema") if isinstance(described, dict) else None
    )


def read_structured_outputs(name: str, value: object) -> str:
    """The JSON schema, as JSON, of vLLM's own field; of the ways that it knows only `json`."""
    if not isinstance(value, dict) or set(value) != {"json"}:
        raise RequestError(
            f"`{name}` must be an object that has `json`, a JSON schema, and nothing else.",
            RequestErrorCode.UNSUPPORTED_VALUE,
        )
    return read_json_schema(f"{name}.json", value["json"])


def read_lora_adapter(name: str, value: object) -> str:
    """The name of a LoRA adapter."""
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_MODEL_CHARS:
        raise invalid_value(f"`{name}` must be a name of up to {_MAX_MODEL_CHARS} characters.")
    return value


def read_stop(name: str, value: object) -> tuple[str, ...]:
    """One stop string or a list of up to four."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(one, str) and one for one in strings):
        raise invalid_value(f"`{name}` must be a string or a list of strings, none of them empty.")
    if len(strings) > _MAX_STOP_STRINGS:
        raise invalid_value(f"`{name}` has {len(strings)} strings; at most {_MAX_STOP_STRINGS} are allowed.")
    return tuple(strings)
