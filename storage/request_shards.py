"""Request shards: token ids, sampling parameters and bodies of a job's requests, in Arrow files.

A job's shards are `jobs/{job_id}/requests/{run}/00000.arrow`, … in ascending seq, where `{run}` is the run
that wrote them, and an index that names them. Which index counts is in the job's row
(`batch_job.request_index`), so nothing that a stale run puts there late can take the place of what a newer
one wrote.
"""

import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from blend_core.errors import StorageError
from blend_core.request import Request, RequestArrays
from storage.database import Database
from storage.jobs import get_job
from storage.object_errors import needed_to_go_on
from storage.objects import ObjectStore
from storage.schema import batch_job
from storage.shard_format import (
    Shard,
    shard_prefix,
)


def request_index_key(db: Database, job_id: str) -> str | None:
    """Key of the index that names the request shards of a job, those of its last checkpoint while it is read;
    None before there is one."""
    statement = sa.select(batch_job.c.request_index).where(batch_job.c.job_id == job_id)
    with db.connect() as connection:
        key: str | None = connection.execute(statement).scalar_one_or_none()
    return key


def open_request_shards(db: Database, objects: ObjectStore, job_id: str) -> "RequestShards":
    """The shards of a job that has been read.

    Raises:
        StorageError: its ingest has not ended.
    """
    key = request_index_key(db, job_id)
    if key is None or get_job(db, job_id).ingested_at is None:
        raise StorageError(f"Job {job_id} has not been read to its end; run it.", job_id=job_id)
    return RequestShards(objects, job_id, key)


class RequestShards:
    """Reads a job's requests. Safe to share between threads.

    Shards are downloaded when they are first needed, into a temporary folder that holds at most
    `max_cached_bytes` (and one shard); the one used longest ago goes first.
    """

    __slots__ = ("_cached", "_folder", "_index", "_job_id", "_lock", "_max_cached_bytes", "_objects")

    def __init__(
        self, objects: ObjectStore, job_id: str, index_key: str, *, max_cached_bytes: int = 4 << 30
    ) -> None:
        """Reads the index that the job's row names (`open_request_shards`)."""
        self._objects = objects
        self._job_id = job_id
        self._max_cached_bytes = max_cached_bytes
        with needed_to_go_on():
            self._index = objects.read_arrow(index_key).to_pydict()
        if "key" not in self._index:
            # Of a job that was read before shards had keys of their runs.
            numbers = range(len(self._index["first_seq"]))
            self._index["key"] = [f"{shard_prefix(job_id)}{number:05}.arrow" for number in numbers]
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
                with needed_to_go_on():
                    self._objects.download(self._index["key"][index], path)
                shard = self._cached[index] = Shard(path)
                # Its space is free when the last reader lets go, even one that is killed.
                path.unlink()
                num_bytes = sum(cached.num_bytes for cached in self._cached.values())
                while num_bytes > self._max_cached_bytes and len(self._cached) > 1:
                    _, oldest = self._cached.popitem(last=False)
                    num_bytes -= oldest.num_bytes
            self._cached.move_to_end(index)
            return shard
