"""Results as one Parquet table, with the same columns whatever the rows hold."""

from io import RawIOBase
from types import TracebackType
from typing import IO, Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from storage.results import ResultRow
from storage.uploads import Upload

_INSTANT = pa.timestamp("us", tz="UTC")
_FIELDS: "list[pa.Field[Any]]" = [
    pa.field("job_id", pa.string(), nullable=False),
    pa.field("seq", pa.int64(), nullable=False),
    pa.field("custom_id", pa.string()),
    pa.field("source_uri", pa.string(), nullable=False),
    pa.field("source_line", pa.int64(), nullable=False),
    pa.field("endpoint", pa.string()),
    pa.field("prompt_excerpt", pa.string()),
    pa.field("model", pa.string(), nullable=False),
    # Null only in a table that is written while the job runs.
    pa.field("status", pa.string()),
    pa.field("output_text", pa.string()),
    pa.field("finish_reason", pa.string()),
    pa.field("num_prompt_tokens", pa.int64()),
    pa.field("num_cached_tokens", pa.int64()),
    pa.field("num_output_tokens", pa.int64()),
    pa.field("error_code", pa.string()),
    pa.field("error_message", pa.string()),
    pa.field("started_at", _INSTANT),
    pa.field("finished_at", _INSTANT),
    pa.field("run_id", pa.string()),
    pa.field("revision", pa.int64()),
]
SCHEMA = pa.schema(_FIELDS)
"""The columns of every table: fixed from the first row, so that files of many nights read as one."""

_ROWS_PER_GROUP = 20_000
_BYTES_PER_GROUP = 32 << 20


class ResultTable:
    """Writes a table row group by row group; at most one row group is in memory.

    A clean exit completes the file; it never closes what it was given.
    """

    __slots__ = ("_job_id", "_model", "_num_bytes", "_rows", "_writer")

    def __init__(self, file: IO[bytes], job_id: str, model: str) -> None:
        self._job_id = job_id
        self._model = model
        self._rows: list[ResultRow] = []
        self._num_bytes = 0
        self._writer = pq.ParquetWriter(file, SCHEMA, compression="zstd")

    def add(self, row: ResultRow) -> None:
        """Adds a row; errors of the file pass through."""
        self._rows.append(row)
        self._num_bytes += len(row.output_text or "") + len(row.prompt_excerpt or "")
        if len(self._rows) >= _ROWS_PER_GROUP or self._num_bytes >= _BYTES_PER_GROUP:
            self._write_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._rows:
            self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        own: dict[str, Any] = {"job_id": self._job_id, "model": self._model}
        columns = [
            [own[name]] * len(self._rows) if name in own else [getattr(row, name) for row in self._rows]
            for name in SCHEMA.names
        ]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA), row_group_size=len(self._rows))
        self._rows, self._num_bytes = [], 0


class UploadFile(RawIOBase):
    """An upload as the file that Arrow writes to."""

    def __init__(self, upload: Upload) -> None:
        """The upload is entered and left by the caller."""
        super().__init__()
        self._upload = upload

    def writable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Bytes written so far."""
        return self._upload.num_bytes

    def write(self, data: Any) -> int:
        """Hands the bytes on; raises `StorageError`."""
        content = bytes(data)
        self._upload.write(content)
        return len(content)
