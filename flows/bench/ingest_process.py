"""The process that `blend bench ingest` measures: a task on stdin, its figures on stdout."""

import resource
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec

from flows.ingest.draft import Draft
from flows.ingest.duplicates import DuplicateCheck
from flows.ingest.items import read_lines
from flows.ingest.parse import ParseOptions
from storage.object_client import ObjectStoreOptions
from storage.objects import ObjectStore


class Task(msgspec.Struct, frozen=True):
    """What to read.

    Attributes:
        endpoint_url, bucket, access_key, secret_key, region: the object store.
        key: the object of request lines.
        num_requests: how many lines it must have.
        model_folder: whose tokenizer is measured.
        num_lines_tokenised: on the first so many lines.
    """

    endpoint_url: str | None
    bucket: str
    access_key: str | None
    secret_key: str | None
    region: str
    key: str
    num_requests: int
    model_folder: str
    num_lines_tokenised: int


class ReadFigures(msgspec.Struct, frozen=True):
    """What reading took.

    Attributes:
        num_requests: lines read; every one was valid.
        duration_s: from the first byte asked for to the last line checked.
        peak_rss_bytes: of this process from its start.
    """

    num_requests: int
    duration_s: float
    peak_rss_bytes: int


class TokenFigures(msgspec.Struct, frozen=True):
    """What tokenising took.

    Attributes:
        num_tokens: prompt tokens.
        duration_s: chat templates included, reading and parsing not.
    """

    num_tokens: int
    duration_s: float


def measure_reading(task: Task) -> ReadFigures:
    """Reads, parses, validates and checks for repeated ids; keeps nothing."""
    objects = _object_store(task)
    options = ParseOptions(model="")
    duplicates = DuplicateCheck(fail_job=True)
    num_requests = 0
    started = time.perf_counter()
    uri = objects.uri(task.key)
    for batch in read_lines(
        uri, objects.iter_line_batches(uri, max_line_bytes=options.max_line_bytes), options
    ):
        items = duplicates.apply(batch)
        num_requests += sum(isinstance(item.parsed, Draft) for item in items)
    duration_s = time.perf_counter() - started
    if num_requests != task.num_requests:
        raise SystemExit(f"{num_requests} of {task.num_requests} lines were valid")
    return ReadFigures(num_requests, duration_s, peak_rss_bytes())


def measure_tokenising(task: Task) -> TokenFigures:
    """Renders and encodes the first lines, in batches as ingest does."""
    from blend_core.tokenizing import Tokenizer
    from flows.ingest.ingest import number_items

    objects = _object_store(task)
    options = ParseOptions(model="")
    uri = objects.uri(task.key)
    batches = []
    num_lines = 0
    for batch in read_lines(
        uri, objects.iter_line_batches(uri, max_line_bytes=options.max_line_bytes), options
    ):
        batches.append(batch)
        num_lines += len(batch)
        if num_lines >= task.num_lines_tokenised:
            break
    tokenizer = Tokenizer(Path(task.model_folder))
    started = time.perf_counter()
    num_tokens = 0
    for numbered in number_items(batches, tokenizer, DuplicateCheck(fail_job=True), max_model_len=1 << 30):
        for one in numbered:
            if isinstance(one.outcome, Exception):
                raise SystemExit(f"line {one.item.source_line}: {one.outcome}")
            num_tokens += one.outcome.num_prompt_tokens
    return TokenFigures(num_tokens, time.perf_counter() - started)


def peak_rss_bytes() -> int:
    """Largest resident size of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():
        # Linux hands the parent's peak on to `getrusage` of a child, so ask for this address space's own.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _object_store(task: Task) -> ObjectStore:
    return ObjectStore(
        ObjectStoreOptions(
            bucket=task.bucket,
            endpoint_url=task.endpoint_url,
            access_key=task.access_key,
            secret_key=task.secret_key,
            region=task.region,
        )
    )


def main(part: Literal["read", "tokenise"], task: Task) -> None:
    """Measures one part and prints its figures as JSON."""
    figures = measure_reading(task) if part == "read" else measure_tokenising(task)
    sys.stdout.buffer.write(msgspec.json.encode(figures))


if __name__ == "__main__":
    main(
        "read" if sys.argv[1] == "read" else "tokenise",
        msgspec.json.decode(sys.stdin.buffer.read(), type=Task),
    )
