"""JSON schemas that answers are to keep to: refused where one is no schema, or too large to generate by."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from blend_core.errors import RequestError, RequestErrorCode

MAX_SCHEMA_BYTES: Final = 64 << 10
"""Longest JSON text of a schema: a grammar of some megabytes takes an engine many seconds, in which nothing
else runs."""

MAX_SCHEMA_LEVELS: Final = 64
"""How deep objects and arrays of a schema may nest, which is as deep as vLLM takes them."""

_MOST_CHARACTERS: Final = 200


def read_json_schema(name: str, value: object) -> str:
    """The JSON text of a schema that is given as an object or as JSON text; `name` names it in errors.

    Raises:
        RequestError: INVALID_SCHEMA: it is no object, no JSON schema, or too large.
    """
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise _invalid(f"`{name}` must be a JSON schema, an object.")
    text = msgspec.json.encode(value)
    if len(text) > MAX_SCHEMA_BYTES:
        raise _invalid(
            f"`{name}` is a JSON schema of {len(text):,} bytes; at most {MAX_SCHEMA_BYTES:,} are taken."
        )
    if _is_deeper(value, MAX_SCHEMA_LEVELS):
        raise _invalid(
            f"`{name}` is nested too deeply; objects and arrays of a JSON schema may nest "
            f"{MAX_SCHEMA_LEVELS} levels deep."
        )
    fault = _fault(text)
    if fault is not None:
        raise _invalid(f"`{name}` is no JSON schema: {fault}.")
    return text.decode()


def _invalid(message: str) -> RequestError:
    return RequestError(message, RequestErrorCode.INVALID_SCHEMA)


def _is_deeper(value: object, num_levels: int) -> bool:
    level: list[Any] = [value]
    for _ in range(num_levels):
        level = [part for node in level for part in _parts(node) if isinstance(part, (dict, list))]
        if not level:
            return False
    return True


def _parts(node: Mapping[str, Any] | list[Any]) -> Any:
    return node if isinstance(node, list) else node.values()


@lru_cache(maxsize=64)
def _fault(text: bytes) -> str | None:
    """What is wrong with a schema, None for a valid one. Kept, since most lines of a file have the same."""
    # Only here: most jobs have no schema.
    from jsonschema import FormatChecker
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    schema = msgspec.json.decode(text)
    default = Draft202012Validator
    kind = validator_for(schema, default=default) if isinstance(schema.get("$schema"), str) else default
    try:
        # Without formats: a pattern that Python does not know may be one that the engine does.
        kind.check_schema(schema, format_checker=FormatChecker(formats=()))
    except SchemaError as error:
        words = f"{error.json_path}: {error.message}".rstrip(".")
        return words if len(words) <= _MOST_CHARACTERS else words[:_MOST_CHARACTERS] + "…"
    return None
