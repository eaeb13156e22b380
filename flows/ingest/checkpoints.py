"""Checkpoints of an ingest: after one, what has been read is not read again, whatever happens then."""

from collections.abc import Sequence
from dataclasses import dataclass

from storage.job_sources import JobSource
from storage.request_shard_writer import RequestShardWriter
from storage.requests import RequestWriter

# Enough that a shard is not much smaller than it may be, and a second or two of work to lose.
_ITEMS_BETWEEN = 20_000


@dataclass(frozen=True, slots=True)
class KeptPart:
    """What an earlier ingest has stored for good.

    Attributes:
        num_sources: the first so many sources need not be read again.
        num_items: lines and rows in them.
    """

    num_sources: int
    num_items: int


def kept_part(listed: Sequence[JobSource]) -> KeptPart:
    """The sources in front that were read to their end, as far as they are objects.

    A query is asked again as a whole with all that follow it: its rows may come in another order.
    """
    num_sources = num_items = 0
    for source in listed:
        if source.num_items is None or source.etag is None:
            break
        num_sources += 1
        num_items += source.num_items
    return KeptPart(num_sources, num_items)


class Checkpoints:
    """Makes a checkpoint where a source ends, when enough has been read since the last one."""

    __slots__ = ("_items_between", "_last_total", "_rows", "_shards")

    def __init__(
        self, rows: RequestWriter, shards: RequestShardWriter, *, items_between: int = _ITEMS_BETWEEN
    ) -> None:
        """Writers of one ingest, which opens and closes them."""
        self._items_between = items_between
        self._rows = rows
        self._shards = shards
        self._last_total = rows.num_total

    def source_read(self, source_index: int, num_items: int) -> None:
        """Call when all items of a source have been given to the writers."""
        self._rows.source_read(source_index, num_items)
        if self._rows.num_total - self._last_total >= self._items_between:
            # In this order: rows without their shard could not run, a shard without rows is replaced.
            self._shards.checkpoint()
            self._rows.shards_stored(self._shards.index_key)
            self._rows.checkpoint()
            self._last_total = self._rows.num_total
