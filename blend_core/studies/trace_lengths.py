"""Token counts of published traces: read from a folder, or generated from their published moments.

Every reader of a folder raises `ConfigurationError` where it lacks the trace's file.
"""

import csv
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from blend_core.errors import ConfigurationError

Ints = npt.NDArray[np.int64]

_GENERATED_ROWS: Final = 20_000
"""Requests of a generated trace, which mixes draw from with replacement."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceLengths:
    """Prompt and output tokens of a trace's requests, both `(num_rows,)`, at least 1."""

    num_prompt_tokens: Ints
    num_output_tokens: Ints


@dataclass(frozen=True, slots=True, eq=False)
class FewShotLengths:
    """A benchmark whose subjects each have one few-shot segment.

    Attributes:
        num_fewshot_tokens: `(num_subjects,)` tokens of each subject's examples.
        subject: `(num_questions,)` subject of each question.
        num_question_tokens: `(num_questions,)`.
    """

    num_fewshot_tokens: Ints
    subject: Ints
    num_question_tokens: Ints


@dataclass(frozen=True, slots=True, eq=False)
class BlockTrace:
    """A trace of prefix blocks: request `i` has blocks `block_ids[offsets[i]:offsets[i + 1]]`.

    Attributes:
        lengths: tokens of each request.
        block_ids: `(num_blocks_in_total,)`, each id with one parent id.
        offsets: `(num_rows + 1,)`.
        block_tokens: tokens of a block; the last block of a prompt may be shorter.
    """

    lengths: TraceLengths
    block_ids: Ints
    offsets: Ints
    block_tokens: int


def data_of(folder: Path | None) -> str:
    """Returns `real` where lengths are read from a folder of traces, `generated` without one."""
    return "generated" if folder is None else "real"


def azure_code(folder: Path | None) -> TraceLengths:
    """Azure's code completion service, 2023 (means 2,048 and 28 tokens)."""
    if folder is None:
        return _generated(0xA2, (2047.8, 0.83), (27.9, 2.15))
    table = _table(folder, "azure_llm_2023.parquet", filters=[("service", "=", "code")])
    return _columns(table.column("input_tokens"), table.column("output_tokens"))


def mmlu_5shot(folder: Path | None) -> FewShotLengths:
    """MMLU with five examples: 57 subjects, 14,042 questions (mean prompt 681 tokens)."""
    if folder is None:
        generator = np.random.default_rng(0x3713)
        return FewShotLengths(
            num_fewshot_tokens=_lognormal(generator, 57, 588.0, 0.85),
            subject=generator.integers(0, 57, 14_042),
            num_question_tokens=_lognormal(generator, 14_042, 93.0, 0.8),
        )
    table = _table(folder, "mmlu_questions.parquet", columns=["subject", "tok_q", "tok_5shot"])
    names, subject = np.unique(np.asarray(table.column("subject").to_pylist()), return_inverse=True)
    question = _ints(table.column("tok_q"))
    examples = _ints(table.column("tok_5shot")) - question
    fewshot = np.array([int(np.median(examples[subject == index])) for index in range(len(names))])
    return FewShotLengths(fewshot.astype(np.int64), subject.astype(np.int64), question)


def deepseek_r1(folder: Path | None) -> TraceLengths:
    """ServeGen's DeepSeek-R1 sample: long reasoning answers (means 1,282 and 1,499 tokens)."""
    if folder is None:
        return _generated(0x21, (1281.9, 3.2), (1499.5, 1.5))
    table = _table(folder, "servegen_r1_sample.parquet")
    return _columns(table.column("input_tokens"), table.column("output_tokens"))


def sharegpt(folder: Path | None) -> TraceLengths:
    """ShareGPT's first turns (means 299 and 324 tokens)."""
    if folder is None:
        return _generated(0x56, (298.8, 2.2), (323.7, 0.9))
    table = _table(folder, "sharegpt_first_turn.parquet")
    return _columns(table.column("input_tokens"), table.column("output_tokens"))


def lmsys(folder: Path | None) -> TraceLengths:
    """LMSYS-Chat-1M's first turns (means 92 and 207 tokens)."""
    if folder is None:
        return _generated(0x15, (92.2, 1.8), (207.4, 0.96))
    table = _table(folder, "lmsys_chat_first_turn.parquet")
    return _columns(table.column("input_tokens"), table.column("output_tokens"))


def gsm8k(folder: Path | None) -> TraceLengths:
    """GSM8K questions with the chain-of-thought answers of Mixtral 8x7B (means 59 and 103 tokens)."""
    if folder is None:
        return _generated(0x68, (59.0, 0.4), (103.3, 0.45))
    with _telling(folder, name := "gsm8k_cot_lengths.csv.gz"), gzip.open(folder / name, "rt") as lines:
        rows = [(int(row["input_tokens"]), int(row["out_mixtral_8x7b"])) for row in csv.DictReader(lines)]
    prompt, output = np.array(rows, dtype=np.int64).T
    return TraceLengths(np.maximum(prompt, 1), np.maximum(output, 1))


def wildbench_outputs(folder: Path | None) -> Ints:
    """Answer lengths of Llama-3-8B-WildChat on WildBench, `(num_rows,)` (mean 546 tokens)."""
    if folder is None:
        return _lognormal(np.random.default_rng(0x3B), 1024, 545.8, 0.96)
    column = _table(folder, "wildbench_output_lengths.parquet").column("Llama-3-8B-WildChat")
    return np.maximum(_ints(column.drop_null()), 1)


def mooncake_conversation(folder: Path) -> BlockTrace:
    """Mooncake's conversation trace with its own ids of 512-token blocks (mean prompt 12,035 tokens)."""
    table = _table(folder, "mooncake_conversation.parquet")
    # Only the stubs have a type argument here; there is none to give at run time.
    blocks = cast(pa.ListArray, table.column("hash_ids").combine_chunks())  # type: ignore[type-arg]
    return BlockTrace(
        lengths=_columns(table.column("input_tokens"), table.column("output_tokens")),
        block_ids=_ints(blocks.values),
        offsets=_ints(blocks.offsets),
        block_tokens=512,
    )


def video_like(generator: np.random.Generator, num_rows: int) -> TraceLengths:
    """Video generation: output tokens log-normal of mean 16,000 and CV 1.0, clipped at 64,000."""
    prompts, outputs = generator.spawn(2)
    return TraceLengths(
        num_prompt_tokens=_lognormal(prompts, num_rows, 120.0, 0.3),
        num_output_tokens=np.minimum(_lognormal(outputs, num_rows, 16_000.0, 1.0), 64_000),
    )


def _table(folder: Path, name: str, **options: Any) -> pa.Table:
    with _telling(folder, name):
        return pq.read_table(folder / name, **options)


@contextmanager
def _telling(folder: Path, name: str) -> Iterator[None]:
    """Says what a folder of traces must hold where one of its files cannot be read."""
    try:
        yield
    except (OSError, EOFError, KeyError, ValueError, pa.ArrowException) as error:
        raise ConfigurationError(
            f"{folder} has no {name} that can be read ({type(error).__name__}); name the folder of traces, "
            "or one that is not there for generated lengths."
        ) from error


def _generated(seed: int, prompt: tuple[float, float], output: tuple[float, float]) -> TraceLengths:
    """Log-normal lengths with the given (mean, coefficient of variation) of prompts and outputs."""
    prompts, outputs = np.random.default_rng(seed).spawn(2)
    return TraceLengths(
        _lognormal(prompts, _GENERATED_ROWS, *prompt), _lognormal(outputs, _GENERATED_ROWS, *output)
    )


def _lognormal(generator: np.random.Generator, num_rows: int, mean: float, variation: float) -> Ints:
    sigma_sq = np.log1p(variation * variation)
    drawn = generator.lognormal(np.log(mean) - sigma_sq / 2, np.sqrt(sigma_sq), num_rows)
    return np.maximum(np.rint(drawn), 1).astype(np.int64)


def _columns(prompt: object, output: object) -> TraceLengths:
    return TraceLengths(np.maximum(_ints(prompt), 1), np.maximum(_ints(output), 1))


def _ints(column: object) -> Ints:
    return np.asarray(column, dtype=np.int64)
