"""The sources of a job as batches of parsed items, in the order that the job names them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from blend_core.errors import ConfigurationError, RequestError, SourceError
from flows.ingest.draft import SourceItem
from flows.ingest.items import read_content, read_rows
from flows.ingest.only_new import OnlyNew, source_identities
from flows.ingest.parse import ParseOptions, json_schema_of, lora_adapter_of
from flows.ingest.read_ahead import read_ahead
from flows.ingest.template import RowTemplate, TemplateOptions
from flows.job_parts import RowSource, SqlSource
from flows.job_spec import BatchJobSpec
from storage.job_sources import JobSource
from storage.objects import ObjectEntry, ObjectStore
from storage.sql_source import stream_rows

OnSourceRead = Callable[[int, int], None]

# How a statement that reads begins, behind comments and brackets. The server has the last word.
_READING_STATEMENT = re.compile(
    r"(?:\s|\(|--[^\n]*(?:\n|\Z)|/\*.*?\*/)*(?:select|with|values|table)\b", re.IGNORECASE | re.DOTALL
)


class Sources:
    """Every item of a job's sources in batches, source by source as they are listed. Read once.

    A batch is read when it is asked for.
    """

    __slots__ = (
        "_first_index", "_identities", "_on_source_read", "_only_new", "_options", "_queries", "_store",
        "_tables", "listed",
    )  # fmt: skip

    def __init__(
        self,
        listed: Sequence[JobSource],
        store: ObjectStore,
        tables: Mapping[str, RowTemplate],
        queries: Mapping[str, tuple[SqlSource, str, RowTemplate]],
        options: ParseOptions,
        only_new: OnlyNew | None,
    ) -> None:
        """Reads nothing yet; `tables` and `queries` are those of the parts that the list names."""
        self.listed = listed
        self._only_new = only_new
        self._store = store
        self._tables = tables
        self._queries = queries
        identities = source_identities([query for query, _, _ in queries.values()])
        self._identities = dict(zip(queries, identities, strict=True))
        self._options = options
        self._first_index = 0
        self._on_source_read: OnSourceRead | None = None

    def start_at(self, index: int, on_source_read: OnSourceRead) -> None:
        """Leave out the sources before `index`, which have been read and stored.

        `on_source_read` is told index and number of items of a source when the batch after its last one is
        asked for: by then whoever reads has dealt with all of it.
        """
        self._first_index, self._on_source_read = index, on_source_read

    def __iter__(self) -> Iterator[list[SourceItem]]:
        with closing(read_ahead(self.listed[self._first_index :], self._read)) as sources:
            for index, (source, content) in enumerate(sources, self._first_index):
                num_items = 0
                for batch in self._batches(source, content):
                    num_items += len(batch)
                    yield batch
                if self._on_source_read is not None:
                    self._on_source_read(index, num_items)

    def _read(self, source: JobSource) -> bytes:
        return self._store.read_source(_entry(source))

    def _batches(self, source: JobSource, read: bytes | None) -> Iterator[list[SourceItem]]:
        if source.part in self._queries:
            return read_rows(source.uri, self._rows(source), self._queries[source.part][2])
        entry = _entry(source)
        content = self._store.open_source(entry, max_line_bytes=self._options.max_line_bytes, content=read)
        batches = read_content(source.uri, content, self._options, self._tables.get(source.part))
        return batches if self._only_new is None else self._only_new.new_items(entry, batches)

    def _rows(self, source: JobSource) -> Iterator[Mapping[str, Any]]:
        query, url, _ = self._queries[source.part]
        if self._only_new is None or query.watermark_column is None:
            return stream_rows(url, query.query)
        return self._only_new.new_rows(source.uri, query, self._identities[source.part], url)


def _entry(source: JobSource) -> ObjectEntry:
    return ObjectEntry(source.uri, source.size_bytes or 0, source.etag or "")


def read_sources(
    job: BatchJobSpec,
    store: ObjectStore,
    source_urls: Mapping[str, str],
    options: ParseOptions,
    listed: Sequence[JobSource] = (),
    only_new: OnlyNew | None = None,
) -> Sources:
    """Opens the job's sources. Templates, connections and addresses are checked at once.

    Args:
        job: names the sources.
        store: where its S3 addresses are read.
        source_urls: Postgres URLs by the names that SQL sources use.
        options: of parsing.
        listed: what an earlier ingest of the job listed; these versions of these objects are read.
        only_new: leaves out what earlier jobs of the name have read; None reads everything.

    Raises:
        ConfigurationError: a template is not valid, or a connection has no URL.
        SourceError: an address holds no object; while reading, what a source answers.
    """
    queries = {f"sql:{number}": one for number, one in enumerate(open_queries(job, source_urls, options), 1)}
    tables = {f"parquet:{number}": one for number, one in enumerate(open_tables(job, options), 1)}
    listed = listed or list_sources(job, store)
    if only_new is not None:
        listed = only_new.new_sources(listed)
    return Sources(listed, store, tables, queries, options, only_new)


def list_sources(job: BatchJobSpec, store: ObjectStore) -> list[JobSource]:
    """What a job reads, in that order: the objects, then the tables, then the queries.

    Raises:
        SourceError: an address holds no object.
    """
    objects = {entry.uri: entry for uri in job.s3 for entry in store.list(uri)}
    found = [("s3", entry) for entry in objects.values()]
    for number, table in enumerate(job.parquet, 1):
        found += [(f"parquet:{number}", entry) for entry in _table_objects(store, table.uri)]
    return [
        *(JobSource(part, entry.uri, entry.size_bytes, entry.etag) for part, entry in found),
        *(JobSource(f"sql:{number}", f"sql:{number}") for number in range(1, len(job.sql) + 1)),
    ]


def _table_objects(store: ObjectStore, uri: str) -> list[ObjectEntry]:
    """The objects of a table; what its writer keeps beside them (`_SUCCESS`, `.crc`) is left out."""
    entries = store.list(uri)
    if uri.endswith(("/", "*")):
        entries = [entry for entry in entries if not entry.uri.rsplit("/", 1)[-1].startswith(("_", "."))]
    if not entries:
        raise SourceError(f"There is no table at or under {uri}; correct the URI.", uri=uri)
    return entries


def open_queries(
    job: BatchJobSpec, source_urls: Mapping[str, str], options: ParseOptions
) -> list[tuple[SqlSource, str, RowTemplate]]:
    """The job's queries with their URLs and compiled templates. Connects to nothing.

    Raises:
        ConfigurationError: a template is not valid, a connection has no URL, a query is no SELECT, or the job
            lacks the adapter or its engine the JSON schema that a source asks for.
    """
    return [_open_query(source, source_urls, options) for source in job.sql]


def open_tables(job: BatchJobSpec, options: ParseOptions) -> list[RowTemplate]:
    """The compiled templates of the job's tables.

    Raises:
        ConfigurationError: one is not valid, or the job lacks the adapter, or its engine the JSON schema,
            that a table asks for.
    """
    return [_row_template(table, options) for table in job.parquet]


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
    return source, url, _row_template(source, options)


def _row_template(source: RowSource, options: ParseOptions) -> RowTemplate:
    try:
        template = RowTemplate(
            TemplateOptions(
                prompt=source.prompt,
                system=source.system,
                id_column=source.id_column or None,
                max_tokens=source.max_tokens or options.default_max_tokens,
                temperature=source.temperature,
                chat_template_kwargs=options.chat_template_kwargs,
                response_format=source.response_format,
                lora_adapter=source.lora_adapter,
            )
        )
        # Where the engine lacks what a source asks for, every row would be at fault.
        json_schema_of({"response_format": template.json_schema}, options)
        lora_adapter_of({"lora_adapter": source.lora_adapter}, options)
    except RequestError as error:
        raise ConfigurationError(error.message) from None
    return template
