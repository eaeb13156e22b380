"""JSON schemas that answers are to keep to: refused where one is no schema, or too large to generate by."""

from collections.abc import Hashable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urljoin

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
    from jsonschema.validators import extend

    return extend(kind, {"uniqueItems": _repeated_items})(_merged_meta_schema(kind.META_SCHEMA))


def _merged_meta_schema(meta: Mapping[str, Any]) -> dict[str, Any]:
    """A draft's meta-schema (the schema that its schemas keep to) as one schema that refers to no other.

    From 2019-09 on a meta-schema is an `allOf` of one schema for each vocabulary: "core" knows `$id` and
    `$defs`, "applicator" knows `properties` and `not`, "validation" knows `type` and `enum`, and so on.
    jsonschema would check each subschema against all of them, one after another. Here their `properties` and
    `$defs` are put together, in their order, so that it is checked once. `$schema` is left out: jsonschema
    would read in it which class is to check, and take its own in place of the one with `_repeated_items`.
    """
    from jsonschema.validators import SPECIFICATIONS

    if "allOf" not in meta:
        return {name: value for name, value in meta.items() if name != "$schema"}
    vocabularies = [SPECIFICATIONS.contents(urljoin(meta["$id"], part["$ref"])) for part in meta["allOf"]]
    schemas = [*vocabularies, meta]
    merged: dict[str, Any] = {"type": meta["type"]}
    for name in ("properties", "$defs"):
        merged[name] = {key: value for schema in schemas for key, value in schema.get(name, {}).items()}
    local: dict[str, Any] = _with_local_references(merged)
    return local


def _with_local_references(node: Any) -> Any:
    """A copy in which every reference is one into the merged meta-schema.

    One to a path keeps the path: `meta/validation#/$defs/stringArray` becomes `#/$defs/stringArray`. Any
    other (`#`, `#meta`, `meta/core`) means "a schema of this draft": `{"$dynamicRef": "#meta"}` becomes
    `{"$ref": "#"}`.
    """
    if isinstance(node, list):
        return [_with_local_references(part) for part in node]
    if not isinstance(node, dict):
        return node
    local: dict[str, Any] = {}
    for name, part in node.items():
        if name in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(part, str):
            path = part.partition("#")[2]
            local["$ref"] = f"#{path}" if path.startswith("/") else "#"
        else:
            local[name] = _with_local_references(part)
    return local


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
