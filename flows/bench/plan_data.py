"""The job that `blend bench plan` plans: made up, as request shards in a folder.

Four kinds of requests, thoroughly mixed, of about 600 prompt tokens in the mean: questions behind one of 57
few-shot segments, chats behind one of 200 system prompts with bounds far apart, questions about documents
(four to a document, all behind one instruction), and short prompts with long answers of a preset length.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.shard_format import SHARD_SCHEMA, arrow_bytes

Ints = npt.NDArray[np.int64]

_SHARD_REQUESTS = 10_000
_VOCAB_SIZE = 128_256
_QUESTIONS_PER_DOCUMENT = 4
_KIND_SHARES = (0.45, 0.25, 0.20, 0.10)
_FEW_SHOT, _CHAT, _DOCUMENT, _LONG_ANSWER = range(4)
_MAX_TOKENS = {_FEW_SHOT: (2,), _CHAT: (64, 512, 4096), _DOCUMENT: (256,)}
_LONGEST_ANSWER = 64_000


def write_request_shards(folder: Path, num_requests: int, seed: int) -> None:
    """Writes a job's request shards; the same arguments give the same files."""
    numbers, shared, own = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3))
    kinds = numbers.choice(len(_KIND_SHARES), num_requests, p=_KIND_SHARES)
    few_shots = _segments(shared, 57, 590.0, 0.8)
    system_prompts = _segments(shared, 200, 200.0, 0.5)
    instruction = _segments(shared, 1, 60.0, 0.0)
    num_documents = max(1, int((kinds == _DOCUMENT).sum()) // _QUESTIONS_PER_DOCUMENT)
    # Documents are made again wherever they are asked about, so that they need no memory here.
    document_seed = int(shared.integers(1 << 32))

    def prefix(kind: int) -> Iterator[npt.NDArray[np.int32]]:
        if kind == _FEW_SHOT:
            yield few_shots[numbers.integers(len(few_shots))]
        elif kind == _CHAT:
            yield system_prompts[numbers.integers(len(system_prompts))]
        elif kind == _DOCUMENT:
            yield instruction[0]
            number = int(numbers.integers(num_documents))
            yield from _segments(np.random.default_rng([document_seed, number]), 1, 900.0, 0.7)

    mean_own = np.array([93.0, 300.0, 40.0, 120.0])
    for index, first in enumerate(range(0, num_requests, _SHARD_REQUESTS)):
        kind = kinds[first : first + _SHARD_REQUESTS]
        rest = _lengths(own, mean_own[kind], 0.7)
        tails = np.split(own.integers(_VOCAB_SIZE, size=rest.sum(), dtype=np.int32), np.cumsum(rest)[:-1])
        prompts = [
            np.concatenate([*prefix(one), tail]) for one, tail in zip(kind.tolist(), tails, strict=True)
        ]
        answers = np.minimum(_lengths(numbers, np.full(len(kind), 16_000.0), 1.0), _LONGEST_ANSWER)
        max_tokens = answers.copy()
        for one, bounds in _MAX_TOKENS.items():
            is_one = kind == one
            max_tokens[is_one] = numbers.choice(bounds, is_one.sum())
        is_preset = kind == _LONG_ANSWER
        table = _table(first + np.arange(len(kind)), prompts, max_tokens, np.where(is_preset, max_tokens, 0))
        (folder / f"{index:05}.arrow").write_bytes(arrow_bytes(table))


def _table(seq: Ints, prompts: list[npt.NDArray[np.int32]], max_tokens: Ints, min_tokens: Ints) -> pa.Table:
    n = len(prompts)
    offsets = np.cumsum([0, *map(len, prompts)], dtype=np.int32)
    tokens = pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(np.concatenate(prompts), pa.int32())
    )
    columns: dict[str, Any] = {
        "seq": seq,
        "token_ids": tokens,
        "max_tokens": max_tokens.astype(np.int32),
        "min_tokens": min_tokens.astype(np.int32),
        "temperature": np.zeros(n),
        "top_p": np.ones(n),
        "top_k": np.zeros(n, dtype=np.int32),
        "seed": pa.nulls(n, pa.int64()),
        "stop": [[]] * n,
        "json_schema": pa.nulls(n, pa.string()),
        "lora_adapter": pa.nulls(n, pa.string()),
        "ignore_eos": np.zeros(n, dtype=np.bool_),
        "body": [b""] * n,
    }
    return pa.Table.from_pydict(columns, schema=SHARD_SCHEMA)


def _segments(
    generator: np.random.Generator, number: int, mean: float, variation: float
) -> list[npt.NDArray[np.int32]]:
    lengths = _lengths(generator, np.full(number, mean), variation)
    return [generator.integers(_VOCAB_SIZE, size=length, dtype=np.int32) for length in lengths.tolist()]


def _lengths(generator: np.random.Generator, mean: npt.NDArray[np.float64], variation: float) -> Ints:
    """Log-normal lengths with the given means and coefficient of variation, at least 1."""
    sigma_sq = np.log1p(variation * variation)
    drawn = generator.lognormal(np.log(mean) - sigma_sq / 2, np.sqrt(sigma_sq))
    return np.asarray(np.maximum(np.rint(drawn), 1), dtype=np.int64)
