"""Lines and rows of sources with every fault that a job would make an error row of."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from blend_core.errors import RequestError, RequestErrorCode
from blend_core.tokenizing import Tokenizer
from flows.ingest.draft import Draft, SourceItem
from flows.ingest.duplicates import DuplicateCheck
from flows.ingest.encoding import encode_drafts, fitted_request

LINES_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class CheckedLine:
    """A non-blank line or a row as it was found.

    Attributes:
        source_uri: the file, object or query.
        number: line of the file, or row of the table or query, from 1.
        custom_id: where it is valid.
        draft: the request, None for a bad line.
        code: what is wrong, None for a good line.
        reason: one sentence, empty for a good line.
    """

    source_uri: str
    number: int
    custom_id: str | None
    draft: Draft | None
    code: RequestErrorCode | None
    reason: str


def checked_items(batches: Iterable[Sequence[SourceItem]]) -> Iterator[CheckedLine]:
    """Every item, repeated ids included. Memory is bounded by the ids and one batch."""
    duplicates = DuplicateCheck(fail_job=False)
    for batch in batches:
        for item in duplicates.apply(batch):
            if isinstance(item.parsed, RequestError):
                error = item.parsed
                yield CheckedLine(
                    item.source_uri, item.source_line, item.custom_id, None, error.code, error.message
                )
            else:
                yield CheckedLine(item.source_uri, item.source_line, item.custom_id, item.parsed, None, "")


def tokenised_items(
    lines: Iterable[CheckedLine], tokenizer: Tokenizer, max_model_len: int
) -> Iterator[CheckedLine]:
    """The lines with what a job of that model finds when it tokenises them: prompts too long among it."""
    checked = iter(lines)
    while batch := list(islice(checked, LINES_AT_ONCE)):
        encoded = encode_drafts([line.draft for line in batch if line.draft is not None], tokenizer)
        for line in batch:
            if line.draft is None:
                yield line
                continue
            fitted = fitted_request(line.draft, next(encoded), max_model_len)
            if isinstance(fitted, RequestError):
                yield replace(line, draft=None, code=fitted.code, reason=fitted.message)
            else:
                yield line
