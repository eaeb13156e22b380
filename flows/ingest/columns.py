"""One row of a table in OpenAI's Batch format, a column a field, to a `Draft`."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from blend_core.errors import RequestError, RequestErrorCode, SourceError
from flows.ingest.draft import Draft
from flows.ingest.parse import ParseOptions, check_custom_id, decode_object, parse_fields
from flows.ingest.template import id_text

COLUMNS = ("custom_id", "method", "url", "body")
"""The columns that are read; a table may have more."""


def check_table(columns: Collection[str], uri: str) -> None:
    """Check that a table has the columns of a request.

    Raises:
        SourceError: it has not.
    """
    missing = [column for column in COLUMNS if column not in columns]
    if missing:
        raise SourceError(
            f"{uri} is a table without the column `{missing[0]}`. Requests need {', '.join(COLUMNS)}; a "
            "table of other columns needs a prompt template: name both under `parquet` in a job file.",
            uri=uri,
        )


def parse_columns(row: Mapping[str, Any], options: ParseOptions) -> Draft:
    """Parse and validate one row.

    Args:
        row: `custom_id`, `method`, `url` and `body`; the body as JSON text, or as a struct in which null
            means absent. Text may come as bytes; a `custom_id` of another type is written as text.
        options: of the job.

    Raises:
        RequestError: what is wrong, as of a line; `ids` hold what is valid.
    """
    fields = dict(row)
    if fields["custom_id"] is not None:
        fields["custom_id"] = id_text(fields["custom_id"])
    try:
        fields |= {name: _text(name, row[name]) for name in ("method", "url", "body")}
        body = fields["body"]
        if isinstance(body, str):
            encoded = body.encode()
            fields["body"] = decode_object(encoded, "body")
        else:
            fields["body"] = _without_nulls(body)
            encoded = msgspec.json.encode(fields["body"])
        line = msgspec.json.encode(fields | {"body": msgspec.Raw(encoded)})
        if len(line) > options.max_line_bytes:
            raise RequestError(
                f"The row is longer than {options.max_line_bytes} bytes.", RequestErrorCode.LINE_TOO_LONG
            )
    except RequestError as error:
        with suppress(RequestError):
            error.ids["custom_id"] = check_custom_id(fields["custom_id"])
        raise
    return parse_fields(fields, line, options)


def _text(name: str, value: object) -> object:
    """Bytes as text: some writers do not mark a column of text as such."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as bad:
            raise RequestError(
                f"`{name}` is not UTF-8 (byte {bad.start}).", RequestErrorCode.INVALID_ENCODING
            ) from None
    return value


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value
