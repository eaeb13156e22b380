"""Request shards: the token ids, sampling parameters and bodies of a job's requests, in Arrow files in the
object store."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from blend_core.request import Request, RequestArrays
from storage.objects import ObjectStore


class RequestShardWriter:
    """Writes shards `jobs/{job_id}/requests/00000.arrow`, … in ascending seq; replaces what an unfinished
    ingest left."""

    def __init__(self, objects: ObjectStore, job_id: str, *, max_shard_bytes: int = 32 << 20) -> None: ...

    def add(self, request: Request, body: bytes) -> int:
        """Adds a request and the bytes it came from; returns the index of its shard (for
        `RequestRow.shard_index`)."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class RequestShards:
    """Reads a job's requests. Shards are downloaded once into a bounded local cache and memory-mapped. Safe
    to share between threads."""

    def __init__(self, objects: ObjectStore, job_id: str, *, max_cached_bytes: int = 4 << 30) -> None: ...

    def load_arrays(self, pending: npt.NDArray[np.int64] | None = None) -> RequestArrays:
        """What the planner reads: all requests, or the named ones, in ascending seq."""

    def fetch(self, seqs: Sequence[int]) -> list[Request]:
        """The named requests, in the order asked for. `StorageError` for an unknown seq."""

    def body(self, seq: int) -> bytes:
        """The bytes the request came from."""

    def close(self) -> None:
        """Removes the local cache."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
