"""The object store: our own bucket, and the S3 objects that sources name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from botocore.exceptions import ClientError

from blend_core.errors import SourceError, StorageError, StorageUnavailableError
from storage.compression import begin_of, plain_chunks
from storage.object_client import ObjectStoreOptions, object_client
from storage.object_errors import CLIENT_ERRORS, error_code, is_missing, source_error, storage_error
from storage.object_lines import LineBatch, read_chunks, split_lines
from storage.parquet_rows import ParquetRows, is_parquet
from storage.ranged_file import RangedFile
from storage.uploads import Upload

_MAX_DELETE_KEYS = 1_000
_MAX_NAMED_KEYS = 3


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """One object as it was listed.

    Attributes:
        uri: `s3://bucket/key`.
        size_bytes: its size.
        etag: its version, with the quotes that S3 puts around it.
    """

    uri: str
    size_bytes: int
    etag: str


class ObjectStore:
    """S3. Keys are in our own bucket; URIs are `s3://bucket/key` anywhere. Safe to share between threads.

    Calls by key raise `StorageError` and `StorageUnavailableError`, calls by URI `SourceError` and
    `SourceUnavailableError`.
    """

    __slots__ = ("_client", "_options")

    def __init__(self, options: ObjectStoreOptions) -> None:
        """Connects to nothing yet."""
        self._options = options
        self._client = object_client(options)

    def uri(self, key: str) -> str:
        """`s3://<our bucket>/<key>`."""
        return f"s3://{self._options.bucket}/{key}"

    def ensure_bucket(self) -> None:
        """Creates our bucket if it is missing; safe when several processes do it at once."""
        bucket = self._options.bucket
        try:
            self._client.head_bucket(Bucket=bucket)
            return
        except CLIENT_ERRORS as error:
            if not is_missing(error):
                raise storage_error(error, self.uri("")) from error
        arguments: dict[str, Any] = {"Bucket": bucket}
        if self._options.endpoint_url is None and self._options.region != "us-east-1":
            arguments["CreateBucketConfiguration"] = {"LocationConstraint": self._options.region}
        try:
            self._client.create_bucket(**arguments)
        except CLIENT_ERRORS as error:
            if error_code(error) not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise storage_error(error, self.uri("")) from error

    def list(self, uri: str) -> list[ObjectEntry]:
        """The object of that key; or every object below a folder (`s3://bucket/folder/`, `s3://bucket/`), or
        whose key begins as a pattern does (`s3://bucket/day-*`), sorted by URI.

        Empty objects that only mark a folder are left out. Raises `SourceError` where there is nothing.
        """
        bucket, key = split_uri(uri)
        if uri == f"s3://{bucket}":
            raise SourceError(f"{uri} names no object; write {uri}/ for all of the bucket.", uri=uri)
        try:
            if key and not key.endswith(("/", "*")):
                exact = self._head(bucket, key)
                if exact is None:
                    raise self._no_such_object(bucket, key)
                return [exact]
            entries = [
                ObjectEntry(f"s3://{bucket}/{found['Key']}", found["Size"], found["ETag"])
                for found in self._pages(bucket, key.removesuffix("*"))
                if not (found["Key"].endswith("/") and found["Size"] == 0)
            ]
        except CLIENT_ERRORS as error:
            raise source_error(error, uri) from error
        if not entries:
            raise SourceError(f"There is no object at or under {uri}; correct the URI.", uri=uri)
        return sorted(entries, key=lambda entry: entry.uri)

    def read_source(self, entry: ObjectEntry) -> bytes:
        """A small object as a whole, in exactly the listed version."""
        bucket, key = split_uri(entry.uri)
        return b"".join(read_chunks(self._client, bucket, key, entry.etag))

    def open_source(
        self, entry: ObjectEntry, *, max_line_bytes: int, content: bytes | None = None
    ) -> Iterator[LineBatch] | ParquetRows:
        """Told by content: the rows of a Parquet file, which the caller closes, or lines of anything else.

        Both are read in exactly the listed version, and while they are used; lines from `content` where it
        has been read.
        """
        bucket, key = split_uri(entry.uri)
        chunks = read_chunks(self._client, bucket, key, entry.etag) if content is None else iter([content])
        first = begin_of(chunks)
        if is_parquet(first):
            file = RangedFile(self._client, bucket, key, etag=entry.etag, size_bytes=entry.size_bytes)
            return ParquetRows(file, entry.uri)
        return split_lines(
            plain_chunks(chain([first], chunks), entry.uri), max_line_bytes=max_line_bytes, start_line=0
        )

    def iter_line_batches(
        self, entry: ObjectEntry | str, *, max_line_bytes: int, start_line: int = 0
    ) -> Iterator[LineBatch]:
        """Lines of an object, plain, gzip or zstd, after the first `start_line` of them.

        An entry of a listing is read in exactly the listed version. A broken connection is resumed at its
        byte.
        """
        uri, etag = (entry.uri, entry.etag) if isinstance(entry, ObjectEntry) else (entry, None)
        bucket, key = split_uri(uri)
        chunks = plain_chunks(read_chunks(self._client, bucket, key, etag), uri)
        return split_lines(chunks, max_line_bytes=max_line_bytes, start_line=start_line)

    def iter_lines(
        self, entry: ObjectEntry | str, *, max_line_bytes: int, start_line: int = 0
    ) -> Iterator[tuple[int, bytes]]:
        """The same line by line: (number from 1, line)."""
        for batch in self.iter_line_batches(entry, max_line_bytes=max_line_bytes, start_line=start_line):
            yield from enumerate(batch.lines, batch.first_line)

    def put(self, key: str, data: bytes | Path) -> ObjectEntry:
        """Stores bytes, or a file's content in parts."""
        if isinstance(data, Path):
            with data.open("rb") as file, self.uploader(key) as upload:
                while chunk := file.read(1 << 20):
                    upload.write(chunk)
            entry = self._head(self._options.bucket, key)
            assert entry is not None
            return entry
        try:
            response = self._client.put_object(Bucket=self._options.bucket, Key=key, Body=data)
        except CLIENT_ERRORS as error:
            raise storage_error(error, self.uri(key)) from error
        return ObjectEntry(self.uri(key), len(data), response["ETag"])

    def get(self, key: str) -> bytes:
        """The whole object."""
        try:
            body = self._client.get_object(Bucket=self._options.bucket, Key=key)["Body"]
            return bytes(body.read())
        except CLIENT_ERRORS as error:
            raise storage_error(error, self.uri(key)) from error

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes:
        """`num_bytes` from byte `start`; the object is at least that long."""
        span = f"bytes={start}-{start + num_bytes - 1}"
        try:
            response = self._client.get_object(Bucket=self._options.bucket, Key=key, Range=span)
            content = bytes(response["Body"].read())
        except CLIENT_ERRORS as error:
            raise storage_error(error, self.uri(key)) from error
        # A server that ignores the range sends everything.
        return content if "ContentRange" in response else content[start : start + num_bytes]

    def download(self, key: str, path: Path) -> None:
        """Writes the object to a file, which appears when it is complete; a broken connection is resumed.

        Raises:
            StorageUnavailableError: the store did not answer, or the file's disk is full, which may pass.
        """
        part = path.with_name(path.name + ".part")
        try:
            with part.open("wb") as file:
                for chunk in read_chunks(self._client, self._options.bucket, key, None):
                    file.write(chunk)
            part.rename(path)
        except SourceError as error:
            if isinstance(error.__cause__, CLIENT_ERRORS):
                raise storage_error(error.__cause__, self.uri(key)) from error
            kind = StorageUnavailableError if error.retryable else StorageError
            raise kind(error.message, uri=self.uri(key)) from error
        except OSError as error:
            part.unlink(missing_ok=True)
            raise StorageUnavailableError(
                f"{path.parent} cannot take a copy of {self.uri(key)} ({error.strerror}); make room there, "
                "or let TMPDIR name another folder.",
                uri=self.uri(key),
            ) from error

    def keys(self, prefix: str) -> Sequence[str]:
        """Our keys that begin with the prefix, sorted; none where the bucket is missing."""
        try:
            return sorted(found["Key"] for found in self._pages(self._options.bucket, prefix))
        except CLIENT_ERRORS as error:
            if is_missing(error):
                return []
            raise storage_error(error, self.uri(prefix)) from error

    def delete(self, keys: Sequence[str]) -> None:
        """Removes our objects; a missing one is no error."""
        for start in range(0, len(keys), _MAX_DELETE_KEYS):
            batch = [{"Key": key} for key in keys[start : start + _MAX_DELETE_KEYS]]
            try:
                answer = self._client.delete_objects(
                    Bucket=self._options.bucket, Delete={"Objects": batch, "Quiet": True}
                )
            except CLIENT_ERRORS as error:
                raise storage_error(error, self.uri(keys[start])) from error
            # The call as a whole succeeds where single keys were refused.
            for refused in answer.get("Errors", []):
                if refused.get("Code") != "NoSuchKey":
                    raise storage_error(
                        ClientError({"Error": refused}, "DeleteObjects"), self.uri(refused["Key"])
                    )

    def uploader(self, key: str) -> Upload:
        """A streaming upload: `with objects.uploader(key) as upload: upload.write(…)`."""
        return Upload(self._client, self._options.bucket, key)

    def read_arrow(self, key: str) -> pa.Table:
        """An Arrow IPC file as a table."""
        with pa.ipc.open_file(pa.BufferReader(self.get(key))) as reader:
            return reader.read_all()

    def _head(self, bucket: str, key: str) -> ObjectEntry | None:
        try:
            found = self._client.head_object(Bucket=bucket, Key=key)
        except ClientError as error:
            # A HEAD has no body, so a missing bucket looks like a missing key: the listing after it tells
            # them apart.
            if is_missing(error):
                return None
            raise
        return ObjectEntry(f"s3://{bucket}/{key}", found["ContentLength"], found["ETag"])

    def _no_such_object(self, bucket: str, key: str) -> SourceError:
        """The error for a key that is not there, with the keys that begin with it."""
        uri = f"s3://{bucket}/{key}"
        begin_so = [found["Key"] for found in islice(self._pages(bucket, key), _MAX_NAMED_KEYS + 1)]
        if not begin_so:
            return SourceError(f"There is no object {uri}; correct the URI.", uri=uri)
        named = ", ".join(begin_so[:_MAX_NAMED_KEYS]) + (", …" if len(begin_so) > _MAX_NAMED_KEYS else "")
        all_of_them = f"{uri}/" if begin_so[0].startswith(f"{key}/") else f"{uri}*"
        return SourceError(
            f"There is no object {uri}, but these keys begin so: {named}; "
            f"name one, or write {all_of_them} for all.",
            uri=uri,
        )

    def _pages(self, bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        for page in pages:
            yield from page.get("Contents", [])


def split_uri(uri: str) -> tuple[str, str]:
    """Bucket and key of an `s3://bucket/key`. Raises `SourceError` for anything else."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not uri.startswith("s3://") or not bucket:
        raise SourceError(f"{uri} is no S3 URI; write s3://bucket/key.", uri=uri)
    return bucket, key
