"""How fast request files are read: lines through the S3 server, parsed, validated, their ids compared.

Reading and tokenising each run in a fresh process, so that the peak memory is that of reading alone.
"""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from blend_core.errors import StorageError
from flows.bench.ingest_process import ReadFigures, Task, TokenFigures
from flows.wiring import Wiring
from storage.ids import new_id
from storage.objects import ObjectStore

MODEL = "smollm2-135m"
NUM_LINES_TOKENISED = 10_000

_POOL_CHARS = 1 << 20
_PROMPT_CHARS = (500, 1_500)
_PIECE_LINES = 1_000
_SYSTEM = "You answer questions about one document each. Answer in one sentence, and only from the document."
_WORDS = """
the of and to in is that it for was on are as with they be at one have this from or had by what
some there we can out other were all your when use word how said an each which do their time if
will way about many then them would write like so these her long make thing see him two has look
more day could go come did number sound no most people my over know water than call first who
may down side been now find any new work part
"""


@dataclass(frozen=True, slots=True)
class IngestBench:
    """Figures of reading one object of request lines.

    Attributes:
        num_requests: distinct lines.
        bytes: size of the object.
        requests_per_s: lines read through the S3 server, parsed and validated, not tokenised.
        bytes_per_s: the same in bytes.
        tokens_per_s: prompt tokens rendered and tokenised per second, measured apart on the first lines.
        peak_rss_bytes: peak memory of the reading process, interpreter and libraries included.
    """

    num_requests: int
    bytes: int
    requests_per_s: float
    bytes_per_s: float
    tokens_per_s: float
    peak_rss_bytes: int


def run_ingest_bench(wiring: Wiring, num_requests: int, tell: Callable[[str], None]) -> IngestBench:
    """Uploads generated lines, reads them back, and removes them again.

    Args:
        wiring: the object store, and the models: the demo model is added where it is missing.
        num_requests: lines to generate; the same ones in every run.
        tell: gets a line about each part of the work.

    Raises:
        StorageError: the object store refused, or a reading process failed.
        ConfigurationError: the demo model cannot be fetched.
    """
    model_folder = wiring.models.add(MODEL).folder
    key = f"bench/{new_id('ingest')}.jsonl"
    tell(f"uploading {num_requests:,} lines")
    num_bytes = upload_lines(wiring.objects, key, num_requests)
    try:
        task = _task(wiring, key, num_requests, model_folder)
        tell(f"reading {num_bytes / 1e6:,.0f} MB")
        read = msgspec.json.decode(_run("read", task), type=ReadFigures)
        tell("tokenising")
        tokens = msgspec.json.decode(_run("tokenise", task), type=TokenFigures)
    finally:
        wiring.objects.delete([key])
    return IngestBench(
        num_requests=read.num_requests,
        bytes=num_bytes,
        requests_per_s=read.num_requests / read.duration_s,
        bytes_per_s=num_bytes / read.duration_s,
        tokens_per_s=tokens.num_tokens / tokens.duration_s,
        peak_rss_bytes=read.peak_rss_bytes,
    )


def upload_lines(objects: ObjectStore, key: str, num_requests: int) -> int:
    """Stores generated lines as one object in parts; returns its size in bytes."""
    num_bytes = 0
    with objects.uploader(key) as upload:
        for piece in request_lines(num_requests):
            num_bytes += len(piece)
            upload.write(piece)
    return num_bytes


def request_lines(num_requests: int, seed: int = 0) -> Iterator[bytes]:
    """Valid request lines, a thousand at a time: distinct, over 1 KB in the mean, the same for a seed."""
    rng = random.Random(seed)
    pool = " ".join(rng.choices(_WORDS.split(), k=_POOL_CHARS // 3))
    for first in range(0, num_requests, _PIECE_LINES):
        numbers = range(first, min(first + _PIECE_LINES, num_requests))
        yield "".join(_line(number, pool, rng) for number in numbers).encode()


def _line(number: int, pool: str, rng: random.Random) -> str:
    # Put together by hand: nothing needs escaping, and an encoder would take longer than what is measured.
    start = rng.randrange(len(pool) - _PROMPT_CHARS[1])
    text = f"Document {number}: {pool[start : start + rng.randint(*_PROMPT_CHARS)]}"
    if number % 4 == 0:
        url, prompt = "/v1/completions", f'"prompt":"{text}"'
    else:
        url = "/v1/chat/completions"
        prompt = (
            f'"messages":[{{"role":"system","content":"{_SYSTEM}"}},{{"role":"user","content":"{text}"}}]'
        )
    body = (
        f'{{"model":"{MODEL}",{prompt},"max_tokens":{16 + number % 500},"temperature":0.7,"seed":{number}}}'
    )
    return f'{{"custom_id":"request-{number}","method":"POST","url":"{url}","body":{body}}}\n'


def _task(wiring: Wiring, key: str, num_requests: int, model_folder: Path) -> Task:
    endpoints = wiring.endpoints
    return Task(
        endpoint_url=endpoints.s3_endpoint_url,
        bucket=endpoints.s3_bucket,
        access_key=endpoints.s3_access_key,
        secret_key=endpoints.s3_secret_key,
        region=endpoints.s3_region,
        key=key,
        num_requests=num_requests,
        model_folder=str(model_folder),
        num_lines_tokenised=NUM_LINES_TOKENISED,
    )


def _run(part: str, task: Task) -> bytes:
    # The task holds the object store's secret: it goes through a pipe, where no list of processes shows it.
    done = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, "-m", "flows.bench.ingest_process", part],
        input=msgspec.json.encode(task),
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode != 0:
        raise StorageError(
            f"The process that measures `{part}` failed with status {done.returncode}; see above."
        )
    return done.stdout
