"""Writing the request shards of a job; `storage.request_shards` says what they are."""

from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from blend_core.errors import StorageError
from blend_core.request import Request
from storage.ids import new_id
from storage.object_errors import needed_to_go_on
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.shard_format import (
    INDEX_SCHEMA,
    SHARD_SCHEMA,
    arrow_bytes,
    shard_prefix,
)

# What a request takes beside its tokens and its body, about.
_FIXED_BYTES = 64


class RequestShardWriter:
    """Writes a job's shards. Entering removes what earlier runs left behind the last checkpoint; a clean exit
    writes the index.

    At most one shard of about `max_shard_bytes` is in memory.

    Attributes:
        index_key: key of the latest index; it counts once the job's row names it.
    """

    __slots__ = (
        "_bodies", "_index", "_job_id", "_max_shard_bytes", "_num_bytes", "_num_kept", "_objects", "_prefix",
        "_requests", "_run", "index_key",
    )  # fmt: skip

    def __init__(
        self,
        objects: ObjectStore,
        run: Run,
        *,
        num_kept: int = 0,
        kept_index_key: str | None = None,
        max_shard_bytes: int = 32 << 20,
    ) -> None:
        """Writes nothing yet.

        Args:
            objects: the platform's bucket.
            run: the run that ingests; its keys are its own.
            num_kept: requests of an earlier ingest that stay, those of its last checkpoint: seq 0 and up.
            kept_index_key: index of that checkpoint.
            max_shard_bytes: where a shard ends.
        """
        self.index_key = kept_index_key
        self._num_kept = num_kept
        self._objects = objects
        self._job_id = run.job_id
        self._run = run
        self._prefix = f"{shard_prefix(run.job_id)}{run.key_part}/"
        self._max_shard_bytes = max_shard_bytes
        self._requests: list[Request] = []
        self._bodies: list[bytes] = []
        self._num_bytes = 0
        self._index: list[tuple[str, int, int, int, int]] = []

    def add(self, request: Request, body: bytes) -> int:
        """Adds a request, with the bytes it came from, and returns the index of its shard.

        Raises:
            StorageError: `seq` is not above the last one's, or the object store refused.
        """
        last_seq = self._requests[-1].seq if self._requests else self._index[-1][2] if self._index else -1
        if request.seq <= last_seq:
            raise StorageError(
                f"Request {request.seq} comes after {last_seq}; add requests in ascending seq.",
                job_id=self._job_id,
                seq=request.seq,
            )
        self._requests.append(request)
        self._bodies.append(body)
        self._num_bytes += request.prompt_token_ids.nbytes + len(body) + _FIXED_BYTES
        shard_index = len(self._index)
        if self._num_bytes >= self._max_shard_bytes:
            self._write_shard()
        return shard_index

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the shards that are stored."""
        return sum(entry[4] for entry in self._index)

    def checkpoint(self) -> None:
        """Stores what was added so far, so that a later ingest can keep it. The request rows come after."""
        if self._requests:
            self._write_shard()
        self._write_index()

    def __enter__(self) -> Self:
        kept: set[str] = set()
        if self._num_kept:
            assert self.index_key is not None, "what is kept has an index"
            with needed_to_go_on():
                found = self._objects.read_arrow(self.index_key).to_pydict()
            self._index = list(zip(*(found[name] for name in INDEX_SCHEMA.names), strict=True))
            kept = {self.index_key, *(entry[0] for entry in self._index)}
        prefix = shard_prefix(self._job_id)
        # Keys sort by the fencing numbers of the runs: what a newer run has written stays.
        left = [key for key in self._objects.keys(prefix) if key < f"{self._prefix}~" and key not in kept]
        self._objects.delete(left)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        if self._requests:
            self._write_shard()
        self._write_index()

    def _write_index(self) -> None:
        columns = list(zip(*self._index, strict=True)) or [()] * len(INDEX_SCHEMA)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, INDEX_SCHEMA, strict=True)]
        table = pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA)
        # A key of its own: the index that the job's row names stays as it is until the row names this one.
        key = f"{self._prefix}{new_id('index')}.arrow"
        self._objects.put(key, arrow_bytes(table))
        self.index_key = key

    def _write_shard(self) -> None:
        requests = self._requests
        lengths = np.array([request.num_prompt_tokens for request in requests], dtype=np.int64)
        offsets = np.zeros(len(requests) + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        tokens = np.concatenate([request.prompt_token_ids for request in requests])
        sampling = [request.sampling for request in requests]
        columns: dict[str, Any] = {
            "seq": [request.seq for request in requests],
            "token_ids": pa.ListArray.from_arrays(
                pa.array(offsets, pa.int32()), pa.array(tokens, pa.int32())
            ),
            "max_tokens": [params.max_tokens for params in sampling],
            "min_tokens": [params.min_tokens for params in sampling],
            "temperature": [params.temperature for params in sampling],
            "top_p": [params.top_p for params in sampling],
            "top_k": [params.top_k for params in sampling],
            "seed": [params.seed for params in sampling],
            "stop": [[text.encode(errors="surrogatepass") for text in params.stop] for params in sampling],
            "ignore_eos": [params.ignore_eos for params in sampling],
            "json_schema": [params.json_schema for params in sampling],
            "lora_adapter": [request.lora_adapter for request in requests],
            "body": self._bodies,
        }
        table = pa.Table.from_pydict(columns, schema=SHARD_SCHEMA)
        key = f"{self._prefix}{len(self._index):05}.arrow"
        self._objects.put(key, arrow_bytes(table))
        self._index.append((key, requests[0].seq, requests[-1].seq, len(requests), int(lengths.sum())))
        self._requests, self._bodies, self._num_bytes = [], [], 0
