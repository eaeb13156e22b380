"""A workload from a Parquet file of token counts, so that anyone can try their own."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from blend_core.errors import ConfigurationError
from blend_core.segment_requests import SegmentRequests
from blend_core.studies.workload import Workload

Ints = npt.NDArray[np.int64]

COLUMNS = ("num_prompt_tokens", "num_output_tokens", "prefix_path", "preset")

MAX_COUNT = 1 << 30
"""Largest number of tokens of a prompt or an answer."""


def read_workload(path: Path) -> Workload:
    """Reads a file with a row per request.

    Columns: `num_prompt_tokens`, `num_output_tokens`, `prefix_path` (a list of pairs of segment id and
    tokens, as lists or structs), `preset` (whether the output length is known beforehand). What a prompt has
    beyond its path is its own.

    Raises:
        ConfigurationError: the file cannot be read, lacks a column, or holds what cannot be.
    """
    try:
        table = pq.read_table(path, columns=list(COLUMNS))
    except (OSError, pa.ArrowException) as error:
        raise ConfigurationError(
            f"{path} cannot be read as Parquet with the columns {', '.join(COLUMNS)} "
            f"({type(error).__name__}); write it with those."
        ) from error
    if len(table) == 0:
        raise ConfigurationError(f"{path.name} has no row; give it a row per request.")
    prompt, output = _counts(path, table, "num_prompt_tokens"), _counts(path, table, "num_output_tokens")
    preset = table.column("preset")
    if preset.null_count or not pa.types.is_boolean(preset.type):
        raise ConfigurationError(f"{path.name}: preset has to be true or false in every row.")
    is_preset = np.asarray(preset, dtype=np.bool_)
    requests = _requests(path, table.column("prefix_path").to_pylist(), prompt, output, is_preset)
    return Workload(path.stem, requests, output, "real")


def _counts(path: Path, table: pa.Table, name: str) -> Ints:
    column = table.column(name)
    if column.null_count or not pa.types.is_integer(column.type):
        raise ConfigurationError(f"{path.name}: {name} has to be whole numbers without gaps.")
    # Numbers beyond int64 come out below 0.
    counts = np.asarray(column).astype(np.int64)
    if counts.min() < 1 or counts.max() > MAX_COUNT:
        raise ConfigurationError(f"{path.name}: {name} has to be from 1 to {MAX_COUNT:,} in every row.")
    return counts


def _requests(
    path: Path, paths: list[Any], prompt: Ints, output: Ints, preset: npt.NDArray[np.bool_]
) -> SegmentRequests:
    # A segment goes by what stands before it, too: prompts share what they begin with and nothing else.
    ids: dict[tuple[int, Any], int] = {}
    tokens_of: dict[Any, int] = {}
    segment_ids: list[int] = []
    segment_tokens: list[int] = []
    offsets = [0]
    own: list[int] = []
    for row, (given, num_prompt_tokens) in enumerate(zip(paths, prompt.tolist(), strict=True)):
        num_own_tokens, parent = num_prompt_tokens, -1
        for segment, num_tokens in _pairs(path, row, given):
            if tokens_of.setdefault(segment, num_tokens) != num_tokens:
                raise ConfigurationError(
                    f"{path.name}: a segment of row {row} has {num_tokens} tokens and had "
                    f"{tokens_of[segment]} before; give one id to one text."
                )
            parent = ids.setdefault((parent, segment), len(ids))
            segment_ids.append(parent)
            segment_tokens.append(num_tokens)
            num_own_tokens -= num_tokens
        if num_own_tokens < 0:
            raise ConfigurationError(
                f"{path.name}: the path of row {row} has more tokens than its prompt; "
                "make num_prompt_tokens the sum or more."
            )
        if num_own_tokens > 0:
            own.append(len(segment_ids))
            segment_ids.append(-1)
            segment_tokens.append(num_own_tokens)
        offsets.append(len(segment_ids))
    flat = np.array(segment_ids, dtype=np.int64)
    flat[own] = len(ids) + np.arange(len(own))
    # What a user would set for a whole table: one bound that cuts nothing off, a power of two.
    bound = 1 << int(output.max() - 1).bit_length()
    longest = np.where(preset, output, bound).astype(np.int32)
    return SegmentRequests(
        seq=np.arange(len(prompt), dtype=np.int64),
        segment_ids=flat,
        segment_tokens=np.array(segment_tokens, dtype=np.int64),
        offsets=np.array(offsets, dtype=np.int64),
        min_tokens=np.where(preset, output, 0).astype(np.int32),
        max_tokens=longest,
    )


def _pairs(path: Path, row: int, given: Any) -> list[tuple[str | int, int]]:
    """Returns the segments of a row's path; no path is one without segments."""
    pairs: list[tuple[str | int, int]] = []
    for pair in given if isinstance(given, list) else () if given is None else (None,):
        values = list(pair.values()) if isinstance(pair, dict) else pair
        match values:
            case (str() | int() as segment, int() as num_tokens) if num_tokens >= 1:
                pairs.append((segment, num_tokens))
            case _:
                raise ConfigurationError(
                    f"{path.name}: the path of row {row} has to be a list of pairs: a segment id (text or a "
                    "whole number) and its tokens, at least 1."
                )
    return pairs
