"""A workload from a Parquet file of token counts, so that anyone can try their own."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from blend_core.errors import ConfigurationError
from blend_core.segment_requests import SegmentRequests
from blend_core.studies.workload import Workload
from blend_core.wording import count_text

Ints = npt.NDArray[np.int64]

COLUMNS: Final[Mapping[str, str]] = {
    "num_prompt_tokens": "whole numbers of tokens",
    "num_output_tokens": "whole numbers of tokens",
    "prefix_path": "lists of pairs, a segment id (text or a whole number) and its whole number of tokens",
    "preset": "true or false",
}
"""What each column of a workload holds."""

MAX_COUNT = 1 << 30
"""Largest number of tokens of a prompt or an answer."""


def read_workload(path: Path) -> Workload:
    """Reads a file with a row per request; errors count rows from 1.

    Columns: `num_prompt_tokens`, `num_output_tokens`, `prefix_path` (a list of pairs of segment id and
    tokens, as lists or structs), `preset` (whether the output length is known beforehand). What a prompt has
    beyond its path is its own.

    Raises:
        ConfigurationError: the file is not there, is no Parquet, lacks a column, or holds what cannot be.
    """
    table = _read_table(path)
    if len(table) == 0:
        raise ConfigurationError(f"{path.name} has no row; give it a row per request.")
    prompt, output = _counts(path, table, "num_prompt_tokens"), _counts(path, table, "num_output_tokens")
    preset = table.column("preset")
    if preset.null_count:
        raise ConfigurationError(
            f"{path.name}: preset is null in {count_text(preset.null_count, 'row')}; make it true or false."
        )
    is_preset = np.asarray(preset, dtype=np.bool_)
    try:
        paths = table.column("prefix_path").to_pylist()
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path.name}: a segment id of prefix_path is not UTF-8; make ids UTF-8 text or whole numbers."
        ) from error
    requests = _requests(path, paths, prompt, output, is_preset)
    return Workload(path.stem, requests, output, "real")


def _read_table(path: Path) -> pa.Table:
    """Returns the columns of a workload, of the right types."""
    if not path.is_file():
        raise ConfigurationError(f"There is no file {path}; name a Parquet file with a row per request.")
    try:
        # Arrow's threads let go of a Python file some time after the read: at the interpreter's exit, which
        # a bad row brings about at once, that aborts the process. So this thread reads alone.
        with path.open("rb") as opened, pq.ParquetFile(opened, pre_buffer=False) as file:
            schema = file.schema_arrow
            for name, expected in COLUMNS.items():
                _check_column(path, schema, name, expected)
            return file.read(columns=list(COLUMNS), use_threads=False)
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path} has a column whose name is not UTF-8; give its columns names in UTF-8."
        ) from error
    except pa.ArrowInvalid as error:
        raise ConfigurationError(
            f"{path} is no Parquet file, or a damaged one; write it with the columns {', '.join(COLUMNS)}."
        ) from error
    except (OSError, pa.ArrowException) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({type(error).__name__}); check its permissions, or write it again."
        ) from error


def _check_column(path: Path, schema: pa.Schema, name: str, expected: str) -> None:
    places = schema.get_all_field_indices(name)
    if not places:
        raise ConfigurationError(f"{path.name} has no column {name}; add it: {expected}.")
    if len(places) > 1:
        raise ConfigurationError(
            f"{path.name} has the column {name} {len(places)} times; write each column once."
        )
    found = schema.field(places[0]).type
    if not _HAS_TYPE[name](found):
        raise ConfigurationError(f"{path.name}: the column {name} is {found}; make it {expected}.")


def _is_path(found: pa.DataType) -> bool:
    """Whether a column may hold paths; a column of nulls alone holds those without segments."""
    if pa.types.is_map(found):
        return _is_segment(found.key_type) and pa.types.is_integer(found.item_type)
    pair = _element_type(found)
    if pair is None:
        return pa.types.is_null(found)
    if pa.types.is_struct(pair):
        return (
            pair.num_fields == 2
            # Arrow makes no value of fields that it cannot tell apart.
            and pair.field(0).name != pair.field(1).name
            and _is_segment(pair.field(0).type)
            and pa.types.is_integer(pair.field(1).type)
        )
    of_pair = _element_type(pair)
    if of_pair is None:
        return pa.types.is_null(pair)
    return pa.types.is_integer(of_pair) or pa.types.is_null(of_pair)


def _element_type(found: pa.DataType) -> pa.DataType | None:
    """What lists of any kind hold; None for what is no list."""
    if pa.types.is_list(found) or pa.types.is_large_list(found) or pa.types.is_fixed_size_list(found):
        element: pa.DataType = found.value_type
        return element
    return None


def _is_segment(found: pa.DataType) -> bool:
    return pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_integer(found)


def _counts(path: Path, table: pa.Table, name: str) -> Ints:
    column = table.column(name)
    if column.null_count:
        raise ConfigurationError(
            f"{path.name}: {name} is null in {count_text(column.null_count, 'row')}; give every row a number."
        )
    # Numbers beyond int64 come out below 0.
    counts = np.asarray(column).astype(np.int64)
    wrong = np.flatnonzero((counts < 1) | (counts > MAX_COUNT))
    if len(wrong):
        raise ConfigurationError(
            f"{path.name}: {name} of row {wrong[0] + 1} is {column[int(wrong[0])].as_py()}; give every row a "
            f"number from 1 to {MAX_COUNT:,}."
        )
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
    for row, (given, num_prompt_tokens) in enumerate(zip(paths, prompt.tolist(), strict=True), start=1):
        num_own_tokens, parent = num_prompt_tokens, -1
        for segment, num_tokens in _pairs(path, row, given):
            if tokens_of.setdefault(segment, num_tokens) != num_tokens:
                raise ConfigurationError(
                    f"{path.name}: a segment of row {row} has {count_text(num_tokens, 'token')} and had "
                    f"{tokens_of[segment]:,} before; give one id to one text."
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


_HAS_TYPE: Final[Mapping[str, Callable[[pa.DataType], bool]]] = {
    "num_prompt_tokens": pa.types.is_integer,
    "num_output_tokens": pa.types.is_integer,
    "prefix_path": _is_path,
    "preset": pa.types.is_boolean,
}
