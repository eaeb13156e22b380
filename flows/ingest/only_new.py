"""Of a job's sources only what is new: rows by watermark, objects by version, and what earlier jobs left."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psycopg

from blend_core.errors import SourceError
from flows.ingest.draft import SourceItem
from flows.job_parts import SqlSource
from flows.job_spec import BatchJobSpec
from storage.job_sources import JobSource
from storage.objects import ObjectEntry
from storage.readings import QueryReading, Readings, Watermark
from storage.sql_source import AT_WATERMARK, NewRows, newest_value, stream_new_rows


class OnlyNew:
    """What a job has to read of its sources, given what earlier jobs of its name have read.

    What was read is kept here until `record` writes it down; a reading that ended early is simply not
    recorded.
    """

    __slots__ = ("_entries", "_leftover_lines", "_queries", "_readings", "_spec")

    def __init__(self, spec: BatchJobSpec, readings: Readings) -> None:
        """Takes the job as it is about to be read, and the readings of its name."""
        self._spec = spec
        self._readings = readings
        self._queries: list[QueryReading] = []
        self._entries: list[ObjectEntry] = []
        self._leftover_lines: dict[tuple[str, str], set[int]] = {}

    def new_sources(self, listed: Sequence[JobSource]) -> Sequence[JobSource]:
        """The queries of a list, and those of its objects that no job of the name has read in this version,
        or not to a result.

        Raises:
            SourceError: an object is named twice, for two prompts: which lines of it were left could not be
                told.
        """
        if not self._spec.s3_only_new:
            return listed
        known = self._readings.objects()
        self._leftover_lines = self._readings.leftover_lines()
        chosen: list[JobSource] = []
        uris: set[str] = set()
        for source in listed:
            if source.etag is None:
                chosen.append(source)
                continue
            if source.uri in uris:
                raise SourceError(
                    f"{source.uri} is named twice, and with `s3_only_new` an object is read once; leave one "
                    "of them out.",
                    uri=source.uri,
                )
            uris.add(source.uri)
            if (source.uri, source.etag) not in known or (source.uri, source.etag) in self._leftover_lines:
                chosen.append(source)
                self._entries.append(ObjectEntry(source.uri, source.size_bytes or 0, source.etag))
        return chosen

    def new_items(
        self, entry: ObjectEntry, batches: Iterator[list[SourceItem]]
    ) -> Iterator[list[SourceItem]]:
        """The lines of an object, or of one that an earlier job read those that it left."""
        lines = self._leftover_lines.get((entry.uri, entry.etag))
        for batch in batches:
            yield batch if lines is None else [item for item in batch if item.source_line in lines]

    def new_rows(
        self, source_uri: str, source: SqlSource, identity: str, url: str
    ) -> Iterator[Mapping[str, Any]]:
        """The new rows of a query that has a watermark.

        Args:
            source_uri: what the requests name as their source.
            source: the query.
            identity: what the reading is remembered under.
            url: where it is read.

        Raises:
            SourceError: the query, or its watermark or id column, was refused.
        """
        assert source.watermark_column is not None
        assert source.id_column
        before = self._readings.watermark(identity)
        leftovers = self._readings.leftovers(identity)
        new = NewRows(source.watermark_column, source.id_column, before.value, before.edge_ids, leftovers.ids)
        newest = newest_value(url, source.query, new) or before.value
        edge_ids = list(before.edge_ids) if newest == before.value else []
        num_rows = 0
        for row in stream_new_rows(url, source.query, new, newest):
            num_rows += 1
            if row.pop(AT_WATERMARK) and row.get(source.id_column) is not None:
                edge_ids.append(str(row[source.id_column]))
            yield row
        after = Watermark(newest, tuple(sorted(set(edge_ids))))
        self._queries.append(QueryReading(identity, source_uri, after, num_rows, leftovers.job_ids))

    def record(self, connection: psycopg.Connection, job_id: str) -> None:
        """Writes down what was read, in the caller's transaction.

        Raises:
            StorageUnavailableError: another job of the name has read meanwhile.
        """
        self._readings.record(connection, job_id, self._queries, self._entries)


def source_identities(sources: Sequence[SqlSource]) -> list[str]:
    """What each query's reading is remembered under: its connection and watermark column, numbered where two
    have the same.

    An edited query keeps its watermark.
    """
    identities: list[str] = []
    for source in sources:
        identity = f"{source.connection.lower()}:{source.watermark_column or ''}"
        number = sum(known.partition("#")[0] == identity for known in identities) + 1
        identities.append(identity if number == 1 else f"{identity}#{number}")
    return identities
