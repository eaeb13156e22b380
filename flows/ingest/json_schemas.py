"""JSON schemas that answers are to keep to: refused where one is no schema, or too large to generate by."""

from collections.abc import Hashable, Iterator, Mapping
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
    try:
        text = msgspec.json.encode(value)
    except (TypeError, RecursionError):
        # From YAML, where names need be no texts, and a value may hold itself.
        raise _invalid(
            f"`{name}` is no JSON schema: its names must be texts, and no part may hold itself."
        ) from None
    if len(text) > MAX_SCHEMA_BYTES:
        raise _invalid(
            f"`{name}` is a JSON schema of {len(text):,} bytes; at most {MAX_SCHEMA_BYTES:,} are taken."
        )
    if _is_deeper(value, MAX_SCHEMA_LEVELS):
        raise _invalid(
            f"`{name}` is nested too deeply; objects and arrays of a JSON schema may nest "
            f"{MAX_SCHEMA_LEVELS} levels deep."
        )
    try:
        fault = _fault(text)
    except RecursionError:
        raise _invalid(
            f"`{name}` is nested too deeply to be checked; give a JSON schema of fewer levels."
        ) from None
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
    from jsonschema.validators import Draft202012Validator, validator_for

    schema = msgspec.json.decode(text)
    default = Draft202012Validator
    try:
        kind = validator_for(schema, default=default) if isinstance(schema.get("$schema"), str) else default
    except ValueError as address_error:
        return f"its `$schema` is no address ({address_error})"
    error = next(_checker_of_schemas(kind).iter_errors(schema), None)
    if error is None:
        return None
    words = f"{error.json_path}: {error.message}".rstrip(".")
    return words if len(words) <= _MOST_CHARACTERS else words[:_MOST_CHARACTERS] + "…"


@lru_cache
def _checker_of_schemas(kind: Any) -> Any:
    """What holds schemas against the schema of that kind's schemas, in a time that grows as their length.

    As `kind.check_schema` without formats: a pattern that Python does not know may be one that the engine
    does.
    """
    from jsonschema.validators import SPECIFICATIONS, extend
    from referencing.jsonschema import specification_with

    # Without `$schema`, where jsonschema would go back to a class of its own.
    own = SPECIFICATIONS.with_resources(
        (
            uri,
            specification_with(resource.contents["$schema"]).create_resource(
                _without_kind(resource.contents)
            ),
        )
        for uri, resource in SPECIFICATIONS.items()
    ).crawl()
    return extend(kind, {"uniqueItems": _repeated_items})(_without_kind(kind.META_SCHEMA), registry=own)


def _without_kind(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != "$schema"}


def _repeated_items(_checker: Any, is_asked: bool, items: object, _schema: object) -> Iterator[Exception]:
    """jsonschema's own compares each object with each: some thousand of them would take minutes."""
    from jsonschema.exceptions import ValidationError

    if is_asked and isinstance(items, list) and len(set(map(_identity, items))) < len(items):
        yield ValidationError(f"{items!r} has non-unique elements")


def _identity(value: object) -> Hashable:
    """Equal for JSON values that are equal as JSON Schema has it: 1 and 1.0, but not 1 and true."""
    if isinstance(value, dict):
        return frozenset((name, _identity(part)) for name, part in value.items())
    if isinstance(value, list):
        return tuple(map(_identity, value))
    return (bool, value) if isinstance(value, bool) else value
