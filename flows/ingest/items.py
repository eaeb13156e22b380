"""Lines and rows of one source as batches of parsed items."""

import gc
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from blend_core.errors import RequestError, SourceError
from flows.ingest.columns import COLUMNS, check_table, parse_columns
from flows.ingest.draft import Draft, SourceItem
from flows.ingest.parse import ParseOptions, is_blank, parse_line
from flows.ingest.template import RowTemplate
from storage.object_lines import LineBatch
from storage.parquet_rows import ParquetRows

# What is parsed together, and tokenised together: enough to be quick, and little memory.
_ROWS_PER_BATCH = 1_000
_BYTES_PER_BATCH = 1 << 20
_EXCERPT_CHARS = 200


def read_content(
    uri: str,
    content: Iterator[LineBatch] | ParquetRows,
    options: ParseOptions,
    template: RowTemplate | None = None,
) -> Iterator[list[SourceItem]]:
    """Items of one object or file: lines, rows in OpenAI's Batch format, or with a template any table's rows.

    Raises:
        SourceError: with a template, it is no table; a table without one lacks the columns of a request.
    """
    if not isinstance(content, ParquetRows):
        if template is not None:
            raise SourceError(f"{uri} is no Parquet file; name request files under `s3`.", uri=uri)
        yield from read_lines(uri, content, options)
        return
    with content as table:
        if template is not None:
            template.check_columns(table.columns)
            yield from read_rows(uri, table.rows(template.columns_read(table.columns)), template)
            return
        check_table(table.columns, uri)
        items = (_parse_row(uri, number, row, options) for number, row in enumerate(table.rows(COLUMNS), 1))
        yield from _in_batches(items)


def read_lines(
    source_uri: str, batches: Iterable[LineBatch], options: ParseOptions
) -> Iterator[list[SourceItem]]:
    """Parse the lines of one object; blank ones are skipped."""
    for batch in batches:
        # The collector would go through the batch's objects many times while they are made, and find nothing.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            items = [
                _parse_line(source_uri, line_number, line, options)
                for line_number, line in enumerate(batch.lines, batch.first_line)
                if not is_blank(line)
            ]
        finally:
            if was_enabled:
                gc.enable()
        yield items


def read_rows(
    source_uri: str, rows: Iterable[Mapping[str, Any]], template: RowTemplate
) -> Iterator[list[SourceItem]]:
    """Fill the template with the rows of one query.

    Raises:
        SourceError: the rows lack the id column.
    """
    yield from _in_batches(_filled(source_uri, rows, template))


def _filled(
    source_uri: str, rows: Iterable[Mapping[str, Any]], template: RowTemplate
) -> Iterator[SourceItem]:
    for number, row in enumerate(rows, 1):
        if number == 1:
            template.check_columns(row.keys())
        yield _fill_row(source_uri, number, row, template)


def _in_batches(items: Iterable[SourceItem]) -> Iterator[list[SourceItem]]:
    batch: list[SourceItem] = []
    num_bytes = 0
    for item in items:
        batch.append(item)
        num_bytes += len(item.parsed.body) if isinstance(item.parsed, Draft) else 0
        if len(batch) >= _ROWS_PER_BATCH or num_bytes >= _BYTES_PER_BATCH:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _parse_line(source_uri: str, source_line: int, line: bytes, options: ParseOptions) -> SourceItem:
    try:
        draft = parse_line(line, options)
    except RequestError as error:
        return _faulty(source_uri, source_line, error, line[: 4 * _EXCERPT_CHARS].decode(errors="replace"))
    return SourceItem(source_uri, source_line, draft.custom_id, draft, _prompt_excerpt(draft))


def _parse_row(
    source_uri: str, source_line: int, row: Mapping[str, Any], options: ParseOptions
) -> SourceItem:
    try:
        draft = parse_columns(row, options)
    except RequestError as error:
        return _faulty(source_uri, source_line, error, str(row["body"]))
    return SourceItem(source_uri, source_line, draft.custom_id, draft, _prompt_excerpt(draft))


def _fill_row(source_uri: str, source_line: int, row: Mapping[str, Any], template: RowTemplate) -> SourceItem:
    try:
        draft = template.fill(row)
    except RequestError as error:
        shown = {name: str(value)[:_EXCERPT_CHARS] for name, value in islice(row.items(), 20)}
        return _faulty(source_uri, source_line, error, str(shown))
    return SourceItem(source_uri, source_line, draft.custom_id, draft, _prompt_excerpt(draft))


def _faulty(source_uri: str, source_line: int, error: RequestError, text: str) -> SourceItem:
    custom_id = error.ids.get("custom_id")
    return SourceItem(
        source_uri, source_line, None if custom_id is None else str(custom_id), error, text[:_EXCERPT_CHARS]
    )


def _prompt_excerpt(draft: Draft) -> str:
    """The beginning of the last message, which tells requests apart better than a shared system message."""
    if draft.messages is not None:
        return str(draft.messages[-1]["content"])[:_EXCERPT_CHARS]
    if draft.prompt is not None:
        return draft.prompt[:_EXCERPT_CHARS]
    return str((draft.prompt_token_ids or [])[: _EXCERPT_CHARS // 4])[:_EXCERPT_CHARS]
