"""Rows of a Parquet file, row group by row group, in bounded memory."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import IOBase
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from blend_core.errors import SourceError
from storage.compression import PARQUET_MAGIC

_ENCRYPTED_MAGIC = b"PARE"
_BATCH_BYTES = 1 << 20
_MAX_BATCH_ROWS = 1_000
_MAX_SHARED_ROWS = 64
# Of one column; what a column chunk has beyond it is fetched when it is needed.
_READ_BYTES = 4 << 20
# Stands for a nested value with text that is no UTF-8: all that can be said of it is that it is no text.
_NO_TEXT = b"\xff"

_TEXT_SCALARS = (pa.StringScalar, pa.LargeStringScalar)
_LIST_SCALARS = (pa.ListScalar, pa.LargeListScalar, pa.FixedSizeListScalar)
# Arrow writes nonsense for years beyond 32767.
_TIME = re.compile(r"-?\d+|(-?\d{1,6}-\d\d-\d\d ?)?(\d\d:\d\d:\d\d(\.\d+)?(Z|[-+]\d\d:?\d\d)?)?")


def is_parquet(first_bytes: bytes) -> bool:
    """Whether content that begins so is a Parquet file."""
    return first_bytes.startswith((PARQUET_MAGIC, _ENCRYPTED_MAGIC))


class ParquetRows:
    """The rows of one Parquet file as Python values. A context manager; for one thread.

    Values are Python's own: int, float, bool, str, bytes, Decimal, date, time, datetime (with its zone),
    list, and dict for a struct or map. What Python has no object for (nanoseconds, years beyond 9999) comes
    as text, text that is no UTF-8 as bytes.

    Attributes:
        columns: names of the file's columns, in its order.
    """

    __slots__ = ("_file", "_parquet", "_uri", "columns")

    def __init__(self, file: IOBase, uri: str) -> None:
        """Reads the file's footer; `file` is closed with this, and here if it is no good.

        Raises:
            SourceError: it is damaged, cut off or encrypted, names two columns alike, or one in no UTF-8.
                Errors of `file` itself pass through.
        """
        self._file = file
        self._uri = uri
        try:
            if file.read(len(_ENCRYPTED_MAGIC)) == _ENCRYPTED_MAGIC:
                raise SourceError(f"{uri} is encrypted Parquet; write it without encryption.", uri=uri)
            with self._arrow_errors("footer"):
                file.seek(0)
                self._parquet = pq.ParquetFile(
                    pa.PythonFile(file, mode="r"),
                    buffer_size=_READ_BYTES,
                    pre_buffer=False,
                    # An old kind of timestamp counts nanoseconds, which would wrap beyond the year 2262.
                    coerce_int96_timestamp_unit="us",
                    page_checksum_verification=True,
                )
            self.columns = tuple(self._parquet.schema_arrow.names)
            twice = sorted(name for name, number in Counter(self.columns).items() if number > 1)
            if twice:
                raise SourceError(f"{uri} has the column {twice[0]} twice; name its columns apart.", uri=uri)
        except UnicodeDecodeError as error:
            file.close()
            raise SourceError(
                f"{uri} has a column whose name is not UTF-8; give its columns names in UTF-8.", uri=uri
            ) from error
        except BaseException:
            file.close()
            raise

    def rows(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Every row in order, with these columns of the file alone; the others are not fetched.

        Raises:
            SourceError: a row group is damaged. Errors of the file itself pass through.
        """
        num_groups = self._parquet.num_row_groups
        for group in range(num_groups):
            with self._arrow_errors(f"row group {group + 1} of {num_groups}"):
                if not columns:
                    yield from ({} for _ in range(self._parquet.metadata.row_group(group).num_rows))
                    continue
                for batch in self._batches(group, list(columns)):
                    names = batch.schema.names
                    for values in zip(*map(_values, batch.columns), strict=True):
                        yield dict(zip(names, values, strict=True))

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _batches(self, group: int, names: list[str]) -> Iterator[pa.RecordBatch]:
        metadata = self._parquet.metadata.row_group(group)
        columns = [metadata.column(index) for index in range(metadata.num_columns)]
        read = [column for column in columns if column.path_in_schema.split(".", 1)[0] in names]
        num_bytes = sum(column.total_uncompressed_size for column in read)
        num_rows = min(_MAX_BATCH_ROWS, _BATCH_BYTES * metadata.num_rows // max(1, num_bytes))
        # A long text that many rows share is stored once, so that sizes say little.
        if any(column.physical_type == "BYTE_ARRAY" and column.has_dictionary_page for column in read):
            num_rows = min(num_rows, _MAX_SHARED_ROWS)
        return self._parquet.iter_batches(
            batch_size=max(1, num_rows),
            row_groups=[group],
            columns=names,
            use_threads=False,
        )

    @contextmanager
    def _arrow_errors(self, place: str) -> Iterator[None]:
        """Tells Arrow's errors as the source's, without their text, which may quote the content."""
        try:
            yield
        except pa.ArrowNotImplementedError as error:
            raise SourceError(
                f"{self._uri} uses a feature of Parquet that cannot be read ({place}); write it with a "
                "common compression (snappy, zstd, gzip) and plain types.",
                uri=self._uri,
            ) from error
        except (pa.ArrowException, OSError) as error:
            raise SourceError(
                f"{self._uri} is Parquet that is damaged or cut off ({place}); write it again.", uri=self._uri
            ) from error


def _values(column: "pa.Array[Any]") -> list[Any]:
    try:
        return column.to_pylist(maps_as_pydicts="strict")
    except (ValueError, OverflowError, KeyError):
        # Somewhere among these: a time beyond Python's, a map that repeats a key, or text that is none.
        return [_value(scalar) for scalar in column]


def _value(scalar: "pa.Scalar[Any]") -> Any:
    try:
        return scalar.as_py(maps_as_pydicts="strict")
    except UnicodeDecodeError:
        return scalar.as_buffer().to_pybytes() if isinstance(scalar, _TEXT_SCALARS) else _NO_TEXT
    except (ValueError, OverflowError, KeyError):
        if isinstance(scalar, pa.StructScalar):
            return {name: _value(part) for name, part in scalar.items()}
        if isinstance(scalar, _LIST_SCALARS):
            return [_value(part) for part in scalar.values or ()]
        return _time_text(scalar)


def _time_text(scalar: "pa.Scalar[Any]") -> str:
    """A time that Python has no object for: as Arrow writes it, or the number that it is stored as."""
    text = str(scalar.cast(pa.string()).as_py())
    return text if _TIME.fullmatch(text) else str(scalar.value)  # type: ignore[attr-defined]
