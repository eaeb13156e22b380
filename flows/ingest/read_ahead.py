"""Small objects fetched side by side, a few ahead of their turn: thousands of them are all waiting else."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from storage.job_sources import JobSource

SMALL_BYTES: Final = 1 << 20
"""An object up to this size is read as a whole; a larger one is streamed in its turn."""

NUM_AT_ONCE: Final = 8
"""Requests to the object store at a time: on one machine two were enough, over a network each one waits."""

NUM_AHEAD: Final = 32
"""At most so many objects lie in memory."""


def read_ahead(
    sources: Sequence[JobSource], read: Callable[[JobSource], bytes]
) -> Generator[tuple[JobSource, bytes | None]]:
    """Each source in its turn, with its content where it is a small object.

    Closing the iterator ends the reading. What `read` raises is raised when it is the object's turn.

    Args:
        sources: what is read, in that order.
        read: fetches an object; called from several threads.
    """
    with ThreadPoolExecutor(NUM_AT_ONCE, thread_name_prefix="read-ahead") as pool:
        begun: deque[tuple[JobSource, Future[bytes] | None]] = deque()
        try:
            for source in sources:
                begun.append((source, pool.submit(read, source) if _is_small(source) else None))
                if len(begun) == NUM_AHEAD:
                    yield _content(begun.popleft())
            while begun:
                yield _content(begun.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _is_small(source: JobSource) -> bool:
    return source.etag is not None and source.size_bytes is not None and source.size_bytes <= SMALL_BYTES


def _content(begun: tuple[JobSource, Future[bytes] | None]) -> tuple[JobSource, bytes | None]:
    source, content = begun
    return source, None if content is None else content.result()
