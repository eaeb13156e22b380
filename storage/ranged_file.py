"""An object as a file that is read in ranges."""

from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from typing import Any

from storage.object_lines import read_chunks


class RangedFile(RawIOBase):
    """One version of an object, read only: every read is a request for just those bytes.

    Errors of reading are those of `read_chunks`.
    """

    def __init__(self, client: Any, bucket: str, key: str, *, etag: str, size_bytes: int) -> None:
        """Reads nothing yet; `etag` and `size_bytes` are those of the listing."""
        super().__init__()
        self._client = client
        self._bucket = bucket
        self._key = key
        self._etag = etag
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._position

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """Moves to another byte; asks the server nothing."""
        base = {SEEK_SET: 0, SEEK_CUR: self._position, SEEK_END: self._size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int = -1) -> bytes:
        """`size` bytes, fewer only at the end."""
        end = self._size_bytes if size < 0 else min(self._position + size, self._size_bytes)
        if end <= self._position:
            return b""
        chunks = read_chunks(self._client, self._bucket, self._key, self._etag, start=self._position, end=end)
        content = b"".join(chunks)
        self._position = end
        return content
