"""Pools of requests of one kind, from which a mix takes as many as it needs.

A pool of `n` rows begins with the pool of fewer rows of the same seed, so that a mix may ask for more.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from blend_core.errors import PlanError
from blend_core.segment_requests import SegmentRequests
from blend_core.studies.trace_lengths import BlockTrace, FewShotLengths, TraceLengths

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Requests of one kind with their true output lengths `(num_requests,)`."""

    requests: SegmentRequests
    num_output_tokens: Ints

    def __len__(self) -> int:
        return len(self.requests)


Draw = Callable[[np.random.Generator, int], Pool]
"""Makes a pool of that many rows."""


def cut_to_kv(pool: Pool, num_kv_tokens: int) -> Pool:
    """Returns the pool with answers that end where KV does: the last token of one is never read.

    Raises:
        PlanError: KV does not hold a prompt.
    """
    requests = pool.requests
    most = num_kv_tokens + 1 - requests.num_prompt_tokens
    if (most < 1).any():
        raise PlanError(
            f"KV has room for {num_kv_tokens:,} tokens and a prompt has "
            f"{int(requests.num_prompt_tokens.max()):,}; name a larger device."
        )
    if (pool.num_output_tokens <= most).all():
        return pool
    output = np.minimum(pool.num_output_tokens, most)
    is_preset = requests.min_tokens == requests.max_tokens
    low, high = (
        np.where(is_preset, output, bound).astype(np.int32)
        for bound in (requests.min_tokens, requests.max_tokens)
    )
    return Pool(replace(requests, min_tokens=low, max_tokens=high), output)


def resampled(lengths: TraceLengths, *, preset: bool = False) -> Draw:
    """Draws requests of a trace with replacement; no two share a prefix."""

    def draw(generator: np.random.Generator, num_rows: int) -> Pool:
        rows = generator.integers(0, len(lengths.num_prompt_tokens), num_rows)
        return _unshared(lengths.num_prompt_tokens[rows], lengths.num_output_tokens[rows], preset)

    return draw


def generated(make: Callable[[np.random.Generator, int], TraceLengths], *, preset: bool = False) -> Draw:
    """Draws requests whose lengths a function makes; no two share a prefix."""

    def draw(generator: np.random.Generator, num_rows: int) -> Pool:
        lengths = make(generator, num_rows)
        return _unshared(lengths.num_prompt_tokens, lengths.num_output_tokens, preset)

    return draw


def few_shot(lengths: FewShotLengths, outputs: Ints) -> Draw:
    """Draws questions behind their subject's few-shot segment; `outputs` are resampled.

    The first copy of the questions is the benchmark itself in random order; later ones are fresh suffixes
    with the lengths of questions drawn again, so that no two prompts are equal.
    """
    num_subjects, num_questions = len(lengths.num_fewshot_tokens), len(lengths.subject)

    def draw(generator: np.random.Generator, num_rows: int) -> Pool:
        first, later, answer = generator.spawn(3)
        rows = np.concatenate([first.permutation(num_questions), later.integers(0, num_questions, num_rows)])
        rows = rows[:num_rows]
        subject = lengths.subject[rows]
        path = np.stack([subject, num_subjects + np.arange(num_rows)], axis=1)
        tokens = np.stack([lengths.num_fewshot_tokens[subject], lengths.num_question_tokens[rows]], axis=1)
        output = outputs[answer.integers(0, len(outputs), num_rows)]
        return _pool(path.ravel(), tokens.ravel(), 2 * np.arange(num_rows + 1), output, preset=False)

    return draw


def block_trace(trace: BlockTrace) -> Draw:
    """Takes the requests of a block trace in random order, each once; asking for more gives what there is.

    The tokens behind a prompt's last whole block are its own.
    """

    def draw(generator: np.random.Generator, num_rows: int) -> Pool:
        rows = generator.permutation(len(trace.lengths.num_prompt_tokens))[:num_rows]
        prompt = trace.lengths.num_prompt_tokens[rows]
        num_whole = np.minimum((prompt - 1) // trace.block_tokens, np.diff(trace.offsets)[rows])
        offsets = np.concatenate(([0], np.cumsum(num_whole + 1)))
        path = np.empty(offsets[-1], dtype=np.int64)
        tokens = np.full(offsets[-1], trace.block_tokens, dtype=np.int64)
        own = int(trace.block_ids.max()) + 1
        for place, row in enumerate(rows):
            start, end = offsets[place], offsets[place + 1]
            path[start : end - 1] = trace.block_ids[trace.offsets[row] :][: end - 1 - start]
            path[end - 1] = own + place
            tokens[end - 1] = prompt[place] - (end - 1 - start) * trace.block_tokens
        return _pool(path, tokens, offsets, trace.lengths.num_output_tokens[rows], preset=False)

    return draw


def alternating(draws: list[Draw]) -> Draw:
    """Takes one request of each kind in turn."""

    def draw(generator: np.random.Generator, num_rows: int) -> Pool:
        each = -(-num_rows // len(draws))
        pools = [one(child, each) for one, child in zip(draws, generator.spawn(len(draws)), strict=True)]
        both = concatenated(pools)
        rows = np.arange(each * len(draws)).reshape(len(draws), each).T.ravel()[:num_rows]
        taken = both.requests.take(rows)
        return Pool(replace(taken, seq=np.arange(num_rows)), both.num_output_tokens[rows])

    return draw


def concatenated(pools: list[Pool]) -> Pool:
    """Puts pools behind one another with fresh numbers and ids, so that nothing is shared between them."""
    ids, base = [], 0
    for pool in pools:
        ids.append(pool.requests.segment_ids + base)
        base += int(pool.requests.segment_ids.max(initial=-1)) + 1
    offsets = [np.zeros(1, dtype=np.int64)]
    for pool in pools:
        offsets.append(pool.requests.offsets[1:] + offsets[-1][-1])
    return Pool(
        SegmentRequests(
            seq=np.arange(sum(map(len, pools))),
            segment_ids=np.concatenate(ids),
            segment_tokens=np.concatenate([pool.requests.segment_tokens for pool in pools]),
            offsets=np.concatenate(offsets),
            min_tokens=np.concatenate([pool.requests.min_tokens for pool in pools]),
            max_tokens=np.concatenate([pool.requests.max_tokens for pool in pools]),
        ),
        np.concatenate([pool.num_output_tokens for pool in pools]),
    )


def _unshared(prompt: Ints, output: Ints, preset: bool) -> Pool:
    return _pool(np.arange(len(prompt)), prompt, np.arange(len(prompt) + 1), output, preset=preset)


def _pool(path: Ints, tokens: Ints, offsets: Ints, output: Ints, *, preset: bool) -> Pool:
    if preset:
        longest = output.astype(np.int32)
    else:
        # What a user would set for a whole table: one bound that cuts nothing off, a power of two.
        longest = np.full(len(output), 1 << int(output.max(initial=1) - 1).bit_length(), dtype=np.int32)
    return Pool(
        SegmentRequests(
            seq=np.arange(len(output)),
            segment_ids=path.astype(np.int64),
            segment_tokens=tokens.astype(np.int64),
            offsets=offsets.astype(np.int64),
            min_tokens=longest if preset else np.zeros(len(output), dtype=np.int32),
            max_tokens=longest,
        ),
        output.astype(np.int64),
    )
