"""Lines of request files with every fault that a job would make an error row of."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from blend_core.errors import RequestError, RequestErrorCode
from flows.ingest.custom_ids import CustomIds
from flows.ingest.draft import Draft, SourceItem
from flows.ingest.duplicates import DuplicateCheck
from flows.ingest.parse import ParseOptions, is_blank, parse_line

LINES_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class CheckedLine:
    """A non-blank line as it was found.

    Attributes:
        number: line of the file or row of the query, from 1.
        custom_id: where it is valid.
        draft: the request, None for a bad line.
        code: what is wrong, None for a good line.
        reason: one sentence, empty for a good line.
    """

    number: int
    custom_id: str | None
    draft: Draft | None
    code: RequestErrorCode | None
    reason: str


def check_lines(lines: Iterable[tuple[int, bytes]], options: ParseOptions) -> Iterator[CheckedLine]:
    """Every non-blank line, parsed and checked, repeated ids included. Memory is bounded by the ids alone."""
    known = CustomIds()
    numbered = ((number, line) for number, line in lines if not is_blank(line))
    while batch := [_checked(number, line, options) for number, line in islice(numbered, LINES_AT_ONCE)]:
        named = [line for line in batch if line.custom_id is not None]
        first_use = known.add(
            [str(line.custom_id) for line in named], np.array([line.number for line in named], dtype=np.int64)
        )
        repeated = {
            line.number: int(first) for line, first in zip(named, first_use, strict=True) if first >= 0
        }
        for line in batch:
            yield _duplicate(line, repeated[line.number]) if line.number in repeated else line


def _checked(number: int, line: bytes, options: ParseOptions) -> CheckedLine:
    try:
        draft = parse_line(line, options)
    except RequestError as error:
        custom_id = error.ids.get("custom_id")
        return CheckedLine(
            number, None if custom_id is None else str(custom_id), None, error.code, error.message
        )
    return CheckedLine(number, draft.custom_id, draft, None, "")


def _duplicate(line: CheckedLine, first: int) -> CheckedLine:
    if line.code is not None:
        return line
    reason = f"`custom_id` was used in line {first} already."
    return CheckedLine(line.number, line.custom_id, None, RequestErrorCode.DUPLICATE_CUSTOM_ID, reason)


def checked_items(batches: Iterable[Sequence[SourceItem]]) -> Iterator[CheckedLine]:
    """What a job's sources hold, repeated ids included: the same as `check_lines` for parsed items."""
    duplicates = DuplicateCheck(fail_job=False)
    for batch in batches:
        for item in duplicates.apply(batch):
            if isinstance(item.parsed, RequestError):
                error = item.parsed
                yield CheckedLine(item.source_line, item.custom_id, None, error.code, error.message)
            else:
                yield CheckedLine(item.source_line, item.custom_id, item.parsed, None, "")
