"""The second and later uses of a `custom_id` in a job."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import msgspec
import numpy as np

from blend_core.errors import RequestError, RequestErrorCode, SourceError
from flows.ingest.custom_ids import CustomIds
from flows.ingest.draft import SourceItem
from flows.ingest.prompts import quoted

_LINE_BITS = 40


class DuplicateCheck:
    """Turns every repeated `custom_id` into an error, across all sources of a job.

    An id counts as used even where that request is at fault elsewhere. A request at fault keeps its error.
    """

    __slots__ = ("_fail_job", "_ids", "_uris")

    def __init__(self, *, fail_job: bool) -> None:
        """Start with no ids; `fail_job` ends the whole job at the first repetition."""
        self._fail_job = fail_job
        self._ids = CustomIds()
        self._uris: list[str] = []

    def apply(self, items: Sequence[SourceItem]) -> list[SourceItem]:
        """The items in their order, good ones that repeat an id replaced by an error. Remembers their ids.

        Args:
            items: the next items of one source; sources follow one another.

        Raises:
            SourceError: an id is repeated and the job asked to fail then.
        """
        checked = list(items)
        named = [index for index, item in enumerate(items) if item.custom_id is not None]
        if not named:
            return checked
        ids = [items[index].custom_id or "" for index in named]
        lines = np.array([items[index].source_line for index in named], dtype=np.int64)
        first_uses = self._ids.add(ids, lines | self._source_bits(items[0].source_uri))
        for place in np.flatnonzero(first_uses >= 0):
            item = items[named[place]]
            if not isinstance(item.parsed, RequestError):
                checked[named[place]] = self._duplicate(item, int(first_uses[place]))
        return checked

    def remember(self, used: Sequence[tuple[str, str, int]]) -> None:
        """Takes ids as used, in the order of their use: (custom_id, uri, line)."""
        for uri, uses in groupby(used, key=itemgetter(1)):
            ids, _, lines = zip(*uses, strict=True)
            self._ids.add(ids, np.array(lines, dtype=np.int64) | self._source_bits(uri))

    def _source_bits(self, uri: str) -> int:
        if not self._uris or self._uris[-1] != uri:
            self._uris.append(uri)
        return (len(self._uris) - 1) << _LINE_BITS

    def _duplicate(self, item: SourceItem, first_use: int) -> SourceItem:
        uri = self._uris[first_use >> _LINE_BITS]
        first_line = first_use & ((1 << _LINE_BITS) - 1)
        kind = "row" if uri.startswith("sql:") else "line"
        reason = (
            f"`custom_id` {quoted(item.custom_id or '')} was used before, by {kind} {first_line} of {uri}"
        )
        if self._fail_job:
            raise SourceError(
                f"{reason}, and again by {item.source_uri}, {item.source_line}; make the ids unique, "
                "or let repetitions become error rows (on_duplicate: row)."
            )
        error = RequestError(f"{reason}.", RequestErrorCode.DUPLICATE_CUSTOM_ID)
        return msgspec.structs.replace(item, parsed=error)
