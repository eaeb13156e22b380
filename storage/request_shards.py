"""Request shards: token ids, sampling parameters and bodies of a job's requests, in Arrow files.

A job's shards are `jobs/{job_id}/requests/00000.arrow`, … in ascending seq, and `index.arrow`, which is
written last: where it is missing, the ingest has not ended.
"""

import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from blend_core.errors import StorageError
from blend_core.request import Request, RequestArrays
from storage.objects import ObjectStore
from storage.shard_format import (
    INDEX_SCHEMA,
    SHARD_SCHEMA,
    Shard,
    arrow_bytes,
    checkpoint_key,
    index_key,
    shard_key,
    shard_prefix,
)

# What a request takes beside its tokens and its body, about.
_FIXED_BYTES = 64


class RequestShardWriter:
    """Writes a job's shards. Entering removes what an unfinished ingest left behind its last checkpoint; a
    clean exit writes the index.

    At most one shard of about `max_shard_bytes` is in memory. With `num_kept`, the requests below that seq
    are those of a checkpoint, whose shards stay.
    """

    __slots__ = (
        "_bodies", "_index", "_job_id", "_max_shard_bytes", "_num_bytes", "_num_kept", "_objects",
        "_requests",
    )  # fmt: skip

    def __init__(
        self, objects: ObjectStore, job_id: str, *, num_kept: int = 0, max_shard_bytes: int = 32 << 20
    ) -> None:
        self._num_kept = num_kept
        self._objects = objects
        self._job_id = job_id
        self._max_shard_bytes = max_shard_bytes
        self._requests: list[Request] = []
        self._bodies: list[bytes] = []
        self._num_bytes = 0
        self._index: list[tuple[int, int, int, int]] = []

    def add(self, request: Request, body: bytes) -> int:
        """Adds a request, with the bytes it came from, and returns the index of its shard.

        Raises:
            StorageError: `seq` is not above the last one's, or the object store refused.
        """
        last_seq = self._requests[-1].seq if self._requests else self._index[-1][1] if self._index else -1
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
        return sum(entry[3] for entry in self._index)

    def checkpoint(self) -> None:
        """Stores what was added so far, so that a later ingest can keep it. The request rows come after."""
        if self._requests:
            self._write_shard()
        self._write_index(checkpoint_key(self._job_id))

    def __enter__(self) -> Self:
        kept: set[str] = set()
        if self._num_kept:
            kept.add(checkpoint_key(self._job_id))
            found = self._objects.read_arrow(checkpoint_key(self._job_id)).to_pydict()
            entries = zip(*(found[name] for name in INDEX_SCHEMA.names), strict=True)
            # A checkpoint whose rows were not committed may have come after.
            self._index = [entry for entry in entries if entry[1] < self._num_kept]
            kept |= {shard_key(self._job_id, index) for index in range(len(self._index))}
        left = self._objects.keys(shard_prefix(self._job_id))
        self._objects.delete([key for key in left if key not in kept])
        if self._num_kept:
            self._write_index(checkpoint_key(self._job_id))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        if self._requests:
            self._write_shard()
        self._write_index(index_key(self._job_id))

    def _write_index(self, key: str) -> None:
        columns = list(zip(*self._index, strict=True)) or [()] * len(INDEX_SCHEMA)
        arrays = [pa.array(column, pa.int64()) for column in columns]
        table = pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA)
        self._objects.put(key, arrow_bytes(table))

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
            "body": self._bodies,
        }
        table = pa.Table.from_pydict(columns, schema=SHARD_SCHEMA)
        self._objects.put(shard_key(self._job_id, len(self._index)), arrow_bytes(table))
        self._index.append((requests[0].seq, requests[-1].seq, len(requests), int(lengths.sum())))
        self._requests, self._bodies, self._num_bytes = [], [], 0


class RequestShards:
    """Reads a job's requests. Safe to share between threads.

    Shards are downloaded when they are first needed, into a temporary folder that holds at most
    `max_cached_bytes` (and one shard); the one used longest ago goes first.
    """

    __slots__ = ("_cached", "_folder", "_index", "_job_id", "_lock", "_max_cached_bytes", "_objects")

    def __init__(self, objects: ObjectStore, job_id: str, *, max_cached_bytes: int = 4 << 30) -> None:
        """Raises `StorageError` when the job's ingest has not ended."""
        self._objects = objects
        self._job_id = job_id
        self._max_cached_bytes = max_cached_bytes
        self._index = objects.read_arrow(index_key(job_id)).to_pydict()
        self._folder = Path(tempfile.mkdtemp(prefix="blend-shards-"))
        self._cached: OrderedDict[int, Shard] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(self._index["num_requests"])

    def load_arrays(self, pending: npt.NDArray[np.int64] | None = None) -> RequestArrays:
        """What the planner reads: all requests, or those of `pending`, in ascending seq."""
        parts = [part for part in self._parts(pending) if len(part)]
        if not parts:
            empty = np.empty(0, dtype=np.int32)
            return RequestArrays(
                np.empty(0, dtype=np.int64), empty, np.zeros(1, dtype=np.int64), empty, empty
            )
        lengths = np.concatenate([part.num_prompt_tokens for part in parts])
        return RequestArrays(
            seq=np.concatenate([part.seq for part in parts]),
            token_ids=np.concatenate([part.token_ids for part in parts]),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            min_tokens=np.concatenate([part.min_tokens for part in parts]),
            max_tokens=np.concatenate([part.max_tokens for part in parts]),
        )

    def fetch(self, seqs: Sequence[int]) -> list[Request]:
        """The named requests, in the order asked for. Raises `StorageError` for a seq that no shard holds."""
        requests: dict[int, Request] = {}
        # In shard order, so that each shard is touched once however the plan scatters them.
        for seq in sorted(set(seqs)):
            shard, row = self._find(seq)
            requests[seq] = shard.request(row)
        return [requests[seq] for seq in seqs]

    def body(self, seq: int) -> bytes:
        """The bytes the request came from. Raises `StorageError` for a seq that no shard holds."""
        shard, row = self._find(seq)
        return shard.body(row)

    def close(self) -> None:
        """Removes the temporary folder. Idempotent."""
        with self._lock:
            self._cached.clear()
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _parts(self, pending: npt.NDArray[np.int64] | None) -> Iterator[RequestArrays]:
        wanted = None if pending is None else np.unique(pending)
        for index, (first, last) in enumerate(
            zip(self._index["first_seq"], self._index["last_seq"], strict=True)
        ):
            if wanted is not None and np.searchsorted(wanted, first) == np.searchsorted(
                wanted, last, "right"
            ):
                continue
            shard = self._shard(index)
            arrays = RequestArrays(
                seq=shard.seq,
                token_ids=shard.tokens,
                offsets=shard.offsets.astype(np.int64),
                min_tokens=shard.column("min_tokens"),
                max_tokens=shard.column("max_tokens"),
            )
            yield arrays if wanted is None else arrays.take(np.flatnonzero(np.isin(shard.seq, wanted)))

    def _find(self, seq: int) -> tuple[Shard, int]:
        index = int(np.searchsorted(self._index["last_seq"], seq))
        if index < len(self._index["last_seq"]):
            shard = self._shard(index)
            row = shard.row(seq)
            if row is not None:
                return shard, row
        raise StorageError(
            f"The shards of job {self._job_id} do not hold request {seq}; submit the job again.",
            job_id=self._job_id,
            seq=seq,
        )

    def _shard(self, index: int) -> Shard:
        with self._lock:
            shard = self._cached.get(index)
            if shard is None:
                path = self._folder / f"{index:05}.arrow"
                self._objects.download(shard_key(self._job_id, index), path)
                shard = self._cached[index] = Shard(path)
                # Its space is free when the last reader lets go, even one that is killed.
                path.unlink()
                num_bytes = sum(cached.num_bytes for cached in self._cached.values())
                while num_bytes > self._max_cached_bytes and len(self._cached) > 1:
                    _, oldest = self._cached.popitem(last=False)
                    num_bytes -= oldest.num_bytes
            self._cached.move_to_end(index)
            return shard
