"""A streaming upload into the object store."""

from types import TracebackType
from typing import Any, Self

from storage.object_errors import CLIENT_ERRORS, storage_error

# S3 takes 10,000 parts of at least 5 MiB: with these, objects up to 160 GB.
PART_BYTES = 16 << 20


class Upload:
    """Writes one object piece by piece. Nothing is visible before a clean exit; an error aborts it.

    Attributes:
        uri: where the object will be.
        num_bytes: bytes written so far.
    """

    __slots__ = ("_bucket", "_buffer", "_client", "_key", "_parts", "_upload_id", "num_bytes", "uri")

    def __init__(self, client: Any, bucket: str, key: str) -> None:
        self.uri = f"s3://{bucket}/{key}"
        self.num_bytes = 0
        self._client = client
        self._bucket = bucket
        self._key = key
        self._buffer = bytearray()
        self._parts: list[dict[str, Any]] = []
        self._upload_id: str | None = None

    def write(self, data: bytes) -> None:
        """Adds bytes; sends a part whenever one is full. Raises `StorageError`."""
        self._buffer += data
        self.num_bytes += len(data)
        if len(self._buffer) >= PART_BYTES:
            self._send_part()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._abort()
            return
        try:
            self._complete()
        except BaseException:
            self._abort()
            raise

    def _send_part(self) -> None:
        try:
            if self._upload_id is None:
                created = self._client.create_multipart_upload(Bucket=self._bucket, Key=self._key)
                self._upload_id = created["UploadId"]
            number = len(self._parts) + 1
            sent = self._client.upload_part(
                Bucket=self._bucket,
                Key=self._key,
                UploadId=self._upload_id,
                PartNumber=number,
                Body=bytes(self._buffer),
            )
        except CLIENT_ERRORS as error:
            raise storage_error(error, self.uri) from error
        self._parts.append({"ETag": sent["ETag"], "PartNumber": number})
        self._buffer.clear()

    def _complete(self) -> None:
        try:
            if self._upload_id is None:
                self._client.put_object(Bucket=self._bucket, Key=self._key, Body=bytes(self._buffer))
                return
            if self._buffer:
                self._send_part()
            self._client.complete_multipart_upload(
                Bucket=self._bucket,
                Key=self._key,
                UploadId=self._upload_id,
                MultipartUpload={"Parts": self._parts},
            )
        except CLIENT_ERRORS as error:
            raise storage_error(error, self.uri) from error

    def _abort(self) -> None:
        if self._upload_id is None:
            return
        try:
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=self._key, UploadId=self._upload_id)
        except CLIENT_ERRORS:
            # The error that led here is the one to report; the store's own clean-up removes the parts.
            return
