"""The object store: our own bucket, and the S3 objects that sources name."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class ObjectStoreOptions:
    """Where objects are.

    Attributes:
        endpoint_url: None for AWS itself.
        bucket: the bucket for our own objects, created if missing.
        access_key: None leaves credentials to boto3's own chain (they refresh themselves).
    """

    bucket: str
    endpoint_url: str | None = None
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)
    region: str = "us-east-1"


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """One object of a listing."""

    uri: str
    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class LineBatch:
    """Consecutive lines of an object.

    Attributes:
        first_line: number of `lines[0]`, from 1.
        lines: without `\\n` (a `\\r` stays), blank ones included. A line over the limit is cut to `max_line_bytes + 1` bytes:
            its length tells.
    """

    first_line: int
    lines: list[bytes]


class Upload:
    """A streaming multipart upload; nothing is visible before a clean exit, an error aborts it."""

    uri: str
    num_bytes: int

    def write(self, data: bytes) -> None: ...


class ObjectStore:
    """S3. Keys are in our own bucket; URIs are `s3://bucket/key` anywhere. Safe to share between threads."""

    def __init__(self, options: ObjectStoreOptions) -> None: ...

    def uri(self, key: str) -> str:
        """`s3://<our bucket>/<key>`."""

    def ensure_bucket(self) -> None:
        """Creates our bucket if it is missing."""

    def list(self, uri: str) -> list[ObjectEntry]:
        """The object, or every object under the prefix, sorted by URI. `SourceError` where there is nothing."""

    def iter_line_batches(self, entry: ObjectEntry | str, *, max_line_bytes: int, start_line: int = 0) -> Iterator[LineBatch]:
        """Lines of an object (plain or gzip, told by content), after skipping `start_line` lines; resumes a broken connection at its byte."""

    def iter_lines(self, entry: ObjectEntry | str, *, max_line_bytes: int, start_line: int = 0) -> Iterator[tuple[int, bytes]]:
        """The same line by line: (line number from 1, line)."""

    def put(self, key: str, data: bytes | Path) -> ObjectEntry: ...

    def get(self, key: str) -> bytes: ...

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes: ...

    def download(self, key: str, path: Path) -> None: ...

    def keys(self, prefix: str) -> list[str]: ...

    def delete(self, keys: list[str]) -> None: ...

    def uploader(self, key: str) -> Upload:
        """`with objects.uploader(key) as upload: upload.write(...)`."""

    def read_arrow(self, key: str) -> pa.Table: ...
