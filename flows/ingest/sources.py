"""The sources of a job as batches of parsed items, in the order that the job names them."""

import gc
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from blend_core.errors import ConfigurationError, RequestError
from flows.ingest.draft import Draft, SourceItem
from flows.ingest.parse import ParseOptions, is_blank, parse_line
from flows.ingest.template import RowTemplate, TemplateOptions
from flows.job_spec import BatchJobSpec, SqlSource
from storage.object_lines import LineBatch
from storage.objects import ObjectEntry, ObjectStore
from storage.sql_source import stream_rows

# What is parsed together, and tokenised together: enough to be quick, and little memory.
_ROWS_PER_BATCH = 1_000
_BYTES_PER_BATCH = 1 << 20
_EXCERPT_CHARS = 200

# How a statement that reads begins, behind comments and brackets. The server has the last word.
_READING_STATEMENT = re.compile(
    r"(?:\s|\(|--[^\n]*(?:\n|\Z)|/\*.*?\*/)*(?:select|with|values|table)\b", re.IGNORECASE | re.DOTALL
)


class Sources:
    """Every item of a job's sources in batches, first the S3 objects, then the queries. Read once.

    A batch is read when it is asked for.
    """

    __slots__ = ("_entries", "_num_items", "_objects", "_options", "_queries")

    def __init__(
        self,
        entries: list[ObjectEntry],
        objects: ObjectStore,
        queries: list[tuple[SqlSource, str, RowTemplate]],
        options: ParseOptions,
    ) -> None:
        self._entries = entries
        self._objects = objects
        self._queries = queries
        self._options = options
        self._num_items: dict[str, int] = {}

    def __iter__(self) -> Iterator[list[SourceItem]]:
        for entry in self._entries:
            lines = self._objects.iter_line_batches(entry, max_line_bytes=self._options.max_line_bytes)
            yield from self._counted(entry.uri, read_lines(entry.uri, lines, self._options))
        for number, (source, url, template) in enumerate(self._queries, 1):
            uri = f"sql:{number}"
            yield from self._counted(uri, read_rows(uri, stream_rows(url, source.query), template))

    def manifest(self) -> list[dict[str, Any]]:
        """What was read so far, source by source: address, items, and size and version of an object."""
        versions = {
            entry.uri: {"size_bytes": entry.size_bytes, "etag": entry.etag} for entry in self._entries
        }
        return [
            {"uri": uri, "num_items": num_items, **versions.get(uri, {})}
            for uri, num_items in self._num_items.items()
        ]

    def _counted(self, uri: str, batches: Iterable[list[SourceItem]]) -> Iterator[list[SourceItem]]:
        self._num_items[uri] = 0
        for batch in batches:
            self._num_items[uri] += len(batch)
            yield batch


def read_sources(
    job: BatchJobSpec, objects: ObjectStore, source_urls: Mapping[str, str], options: ParseOptions
) -> Sources:
    """Opens the job's sources. Templates, connections and addresses are checked at once.

    Args:
        job: names the sources.
        objects: where its S3 addresses are read.
        source_urls: Postgres URLs by the names that SQL sources use.
        options: of parsing.

    Raises:
        ConfigurationError: a template is not valid, or a connection has no URL.
        SourceError: an address holds no object; while reading, what a source answers.
    """
    queries = open_queries(job, source_urls, options)
    entries = {entry.uri: entry for uri in job.s3 for entry in objects.list(uri)}
    return Sources(list(entries.values()), objects, queries, options)


def open_queries(
    job: BatchJobSpec, source_urls: Mapping[str, str], options: ParseOptions
) -> list[tuple[SqlSource, str, RowTemplate]]:
    """The job's queries with their URLs and compiled templates. Connects to nothing.

    Raises:
        ConfigurationError: a template is not valid, a connection has no URL, or a query is no SELECT.
    """
    return [_open_query(source, source_urls, options) for source in job.sql]


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
    batch: list[SourceItem] = []
    num_bytes = 0
    for number, row in enumerate(rows, 1):
        if number == 1:
            template.check_columns(row.keys())
        item = _fill_row(source_uri, number, row, template)
        batch.append(item)
        num_bytes += len(item.parsed.body) if isinstance(item.parsed, Draft) else 0
        if len(batch) >= _ROWS_PER_BATCH or num_bytes >= _BYTES_PER_BATCH:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _open_query(
    source: SqlSource, source_urls: Mapping[str, str], options: ParseOptions
) -> tuple[SqlSource, str, RowTemplate]:
    url = source_urls.get(source.connection)
    if url is None:
        raise ConfigurationError(
            f"There is no connection {source.connection!r}; "
            f"set BLEND_SOURCES__{source.connection.upper()} to its URL where the job runs (a submitted job: "
            "in the environment of `blend up`, then run that again)."
        )
    if not _READING_STATEMENT.match(source.query):
        raise ConfigurationError(
            "A `query` must be one SELECT (or WITH … SELECT, VALUES, TABLE): a source only reads."
        )
    template = RowTemplate(
        TemplateOptions(
            prompt=source.prompt,
            system=source.system,
            id_column=source.id_column or None,
            max_tokens=source.max_tokens or options.default_max_tokens,
            temperature=source.temperature,
        )
    )
    return source, url, template


def _parse_line(source_uri: str, source_line: int, line: bytes, options: ParseOptions) -> SourceItem:
    try:
        draft = parse_line(line, options)
    except RequestError as error:
        return _faulty(source_uri, source_line, error, line[: 4 * _EXCERPT_CHARS].decode(errors="replace"))
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
