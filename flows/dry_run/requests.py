"""Requests as a planner reads them, from lines that were checked."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from blend_core.errors import RequestError, RequestErrorCode
from blend_core.request import RequestArrays
from blend_core.tokenizing import Tokenizer
from flows.dry_run.lines import LINES_AT_ONCE, CheckedLine
from flows.ingest.draft import Draft
from flows.ingest.encoding import encode_drafts, fitted_request

BYTES_PER_TOKEN = 4
"""Bytes of text that stand for a token where nothing is tokenised."""


@dataclass(frozen=True, slots=True)
class DryRequests:
    """Requests of a file as a planner reads them.

    Attributes:
        arrays: the requests that can be planned.
        bad_lines: how many lines would become error rows, by error code.
        templates: key of each request's prompt template, row by row.
    """

    arrays: RequestArrays
    bad_lines: dict[str, int]
    templates: tuple[str, ...]

    @property
    def num_bad(self) -> int:
        """Lines that would become error rows."""
        return sum(self.bad_lines.values())


def read_requests(
    lines: Iterable[CheckedLine],
    tokenizer: Tokenizer | None,
    max_model_len: int,
    on_progress: Callable[[int], None],
) -> DryRequests:
    """Token ids of every good line.

    Args:
        lines: as `checked_items` gives them.
        tokenizer: the model's own; None takes groups of `BYTES_PER_TOKEN` bytes for tokens, which keeps
            shared prefixes and gets lengths roughly right for English.
        max_model_len: longest prompt plus answer; longer prompts count as bad, answers are cut to what is
            left.
        on_progress: told now and then how many lines have been read.
    """
    tokens: list[npt.NDArray[np.int32]] = []
    lengths: list[int] = []
    bounds: list[tuple[int, int]] = []
    templates: list[str] = []
    bad_lines: Counter[str] = Counter()
    num_lines = 0
    checked = iter(lines)
    while batch := list(islice(checked, LINES_AT_ONCE)):
        num_lines += len(batch)
        bad_lines.update(line.code.value for line in batch if line.code is not None)
        drafts = [line.draft for line in batch if line.draft is not None]
        encoded = (
            encode_drafts(drafts, tokenizer)
            if tokenizer is not None
            else (_pieces(draft) for draft in drafts)
        )
        fitting = []
        for draft, token_ids in zip(drafts, encoded, strict=True):
            fitted = fitted_request(draft, token_ids, max_model_len)
            if isinstance(fitted, RequestError):
                bad_lines[fitted.code.value] += 1
                continue
            token_ids, sampling = fitted
            if len(token_ids) == 0:
                bad_lines[RequestErrorCode.EMPTY_PROMPT.value] += 1
                continue
            fitting.append(token_ids)
            templates.append(draft.prompt_template)
            bounds.append((sampling.min_tokens, sampling.max_tokens))
        # One array a batch: hundreds of thousands of small ones would cost more than their tokens.
        if fitting:
            tokens.append(np.concatenate(fitting))
            lengths.extend(len(token_ids) for token_ids in fitting)
        on_progress(num_lines)
    limits = np.array(bounds, dtype=np.int32).reshape(-1, 2)
    arrays = RequestArrays(
        seq=np.arange(len(lengths), dtype=np.int64),
        token_ids=np.concatenate(tokens) if tokens else np.empty(0, dtype=np.int32),
        offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)]),
        min_tokens=np.ascontiguousarray(limits[:, 0]),
        max_tokens=np.ascontiguousarray(limits[:, 1]),
    )
    return DryRequests(arrays, dict(bad_lines), tuple(templates))


def rows_within(requests: RequestArrays, max_model_len: int) -> npt.NDArray[np.int64]:
    """Returns the rows whose prompt leaves room for the shortest answer, as `fitted_request` has it."""
    room = max_model_len - requests.num_prompt_tokens
    return np.flatnonzero(room >= np.maximum(requests.min_tokens, 1))


def cut_to(requests: RequestArrays, max_model_len: int) -> RequestArrays:
    """Returns requests of `rows_within` with `max_tokens` cut to the room that is left. Does not mutate."""
    room = max_model_len - requests.num_prompt_tokens
    return replace(requests, max_tokens=np.minimum(requests.max_tokens, room).astype(np.int32))


def _pieces(draft: Draft) -> npt.NDArray[np.int32]:
    """Groups of bytes as token ids: equal text gives equal ids."""
    if draft.prompt_token_ids is not None:
        return np.array(draft.prompt_token_ids, dtype=np.int32)
    text = draft.prompt
    if text is None:
        text = "".join(f"{message['role']}\n{message['content']}\n" for message in draft.messages or [])
    data = text.encode()
    padded = data + bytes(-len(data) % BYTES_PER_TOKEN)
    return np.frombuffer(padded, dtype=np.int32) & np.int32(0x7FFFFFFF)
