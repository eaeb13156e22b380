"""The ingest stage: parsed items become request shards and request rows, bad ones error rows."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from blend_core.errors import RequestError
from blend_core.request import Request
from blend_core.tokenizing import TokenIds, Tokenizer
from flows.ingest.draft import Draft, SourceItem
from flows.ingest.duplicates import DuplicateCheck
from flows.ingest.encoding import encode_drafts, fitted_request
from storage.request_shard_writer import RequestShardWriter
from storage.requests import RequestRow, RequestWriter


@dataclass(frozen=True, slots=True)
class IngestCounts:
    """What ingest has written so far.

    Attributes:
        total: every non-blank line and every row, bad ones included.
        errored: bad ones among them.
        num_prompt_tokens: of the good ones.
        errors_by_code: bad ones by error code, without those that an earlier ingest wrote.
    """

    total: int = 0
    errored: int = 0
    num_prompt_tokens: int = 0
    errors_by_code: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


class NumberedItem(msgspec.Struct, frozen=True):
    """A source item with its number in the job and its token ids, or what is wrong with it.

    Attributes:
        item: the line or row.
        seq: number in the job, from 0, bad ones counted.
        outcome: the request to run, or the error.
    """

    item: SourceItem
    seq: int
    outcome: Request | RequestError


def ingest(
    batches: Iterable[Sequence[SourceItem]],
    tokenizer: Tokenizer,
    rows: RequestWriter,
    shards: RequestShardWriter,
    *,
    max_model_len: int,
    fail_job_on_duplicate: bool = False,
    on_progress: Callable[[IngestCounts], None] | None = None,
    used_ids: Iterable[Sequence[tuple[str, str, int]]] = (),
) -> IngestCounts:
    """Read all sources to their end and write what they hold.

    One batch is in memory at a time. The writers are opened and closed here: the rows mark the ingest as
    complete only after the last shard is stored. An ingest that ended in the middle leaves the job
    unfinished; another one goes on behind what its writers keep of it, and replaces the rest.

    Args:
        batches: parsed items, source by source.
        tokenizer: of the job's model.
        rows: where request rows and error rows go.
        shards: where token ids and bodies go.
        max_model_len: longest prompt plus answer, in tokens.
        fail_job_on_duplicate: end the job at the first repeated `custom_id`.
        on_progress: told the counts after each batch.
        used_ids: ids of the requests that the writers keep, in batches: (custom_id, uri, line).

    Raises:
        SourceError: a source cannot be read, or an id is repeated and the job asked to fail then.
        StorageError: a write was refused.
    """
    duplicates = DuplicateCheck(fail_job=fail_job_on_duplicate)
    for used in used_ids:
        duplicates.remember(used)
    errors: Counter[str] = Counter()
    with rows:
        with shards:
            kept = counts = IngestCounts(rows.num_total, rows.num_errored, shards.num_prompt_tokens)
            for batch in number_items(
                batches, tokenizer, duplicates, max_model_len=max_model_len, first_seq=kept.total
            ):
                num_tokens = 0
                for numbered in batch:
                    if isinstance(numbered.outcome, RequestError):
                        errors[numbered.outcome.code] += 1
                        _write_error(rows, numbered, numbered.outcome)
                    else:
                        num_tokens += numbered.outcome.num_prompt_tokens
                        _write_request(rows, shards, numbered, numbered.outcome)
                counts = IngestCounts(
                    total=counts.total + len(batch),
                    errored=kept.errored + errors.total(),
                    num_prompt_tokens=counts.num_prompt_tokens + num_tokens,
                    errors_by_code=MappingProxyType(dict(errors)),
                )
                if on_progress is not None:
                    on_progress(counts)
        rows.shards_stored(shards.index_key)
    return counts


def number_items(
    batches: Iterable[Sequence[SourceItem]],
    tokenizer: Tokenizer,
    duplicates: DuplicateCheck,
    *,
    max_model_len: int,
    first_seq: int = 0,
) -> Iterator[list[NumberedItem]]:
    """Number the items of a job, check their ids, tokenise their prompts and fit them into the context.

    A prompt needs room for itself and at least one output token (`min_tokens` where that is more), else it is
    PROMPT_TOO_LONG. `max_tokens` is cut to the room that is left.
    """
    seq = first_seq
    for batch in batches:
        items = duplicates.apply(batch)
        encoded = encode_drafts([item.parsed for item in items if isinstance(item.parsed, Draft)], tokenizer)
        numbered = []
        for item in items:
            outcome: Request | RequestError
            if isinstance(item.parsed, RequestError):
                outcome = item.parsed
            else:
                outcome = _request(seq, item.parsed, next(encoded), max_model_len)
            numbered.append(NumberedItem(item, seq, outcome))
            seq += 1
        yield numbered


def _request(
    seq: int, draft: Draft, token_ids: TokenIds | RequestError, max_model_len: int
) -> Request | RequestError:
    fitted = fitted_request(draft, token_ids, max_model_len)
    return fitted if isinstance(fitted, RequestError) else Request(seq, *fitted, draft.lora_adapter)


def _write_request(
    rows: RequestWriter, shards: RequestShardWriter, numbered: NumberedItem, request: Request
) -> None:
    item, draft = numbered.item, numbered.item.parsed
    assert isinstance(draft, Draft)
    rows.add(
        RequestRow(
            seq=request.seq,
            source_uri=item.source_uri,
            source_line=item.source_line,
            custom_id=item.custom_id,
            endpoint=draft.endpoint.value,
            model=draft.model,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.sampling.max_tokens,
            prompt_excerpt=item.excerpt,
            shard_index=shards.add(request, draft.body),
            prompt_template=None if request.sampling.has_preset_length else draft.prompt_template,
        )
    )


def _write_error(rows: RequestWriter, numbered: NumberedItem, error: RequestError) -> None:
    item = numbered.item
    endpoint, model = error.ids.get("endpoint"), error.ids.get("model")
    if isinstance(item.parsed, Draft):
        endpoint, model = item.parsed.endpoint.value, item.parsed.model
    row = RequestRow(
        seq=numbered.seq,
        source_uri=item.source_uri,
        source_line=item.source_line,
        custom_id=item.custom_id,
        endpoint=None if endpoint is None else str(endpoint),
        model=None if model is None else str(model),
        prompt_excerpt=item.excerpt,
    )
    rows.add_error(row, error.code, error.message)
