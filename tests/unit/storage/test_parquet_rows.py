"""Rows of Parquet files as Python values, and files that cannot be read."""

import datetime
import io
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blend_core.errors import SourceError
from storage.parquet_rows import ParquetRows


def file_of(table: pa.Table, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return io.BytesIO(file.getvalue())


def rows_of(table: pa.Table, columns: list[str] | None = None, **options: Any) -> list[dict[str, Any]]:
    with ParquetRows(file_of(table, **options), "s3://b/t") as rows:
        return list(rows.rows(list(rows.columns) if columns is None else columns))


ODD = {
    "huge": (pa.array([2**64 - 1, None], pa.uint64()), [2**64 - 1, None]),
    "decimal": (pa.array([Decimal("1.50"), None], pa.decimal128(9, 2)), [Decimal("1.50"), None]),
    "day": (pa.array([0, 10_000_000], pa.date32()), [datetime.date(1970, 1, 1), "29349-01-26"]),
    "nanoseconds": (
        pa.array([1_000, 1], pa.timestamp("ns")),
        [datetime.datetime(1970, 1, 1, 0, 0, 0, 1), "1970-01-01 00:00:00.000000001"],
    ),
    "beyond": (pa.array([2**50, 0], pa.timestamp("s")), [str(2**50 * 1000), datetime.datetime(1970, 1, 1)]),
    "zone": (
        pa.array([0, None], pa.timestamp("us", "UTC")),
        [datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC), None],
    ),
    "bytes": (pa.array([b"ab", b"\xff"]), [b"ab", b"\xff"]),
    "nested": (pa.array([{"a": [1, None]}, None]), [{"a": [1, None]}, None]),
    "map": (
        pa.array([[("k", 1)], [("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64())),
        [{"k": 1}, [{"key": "k", "value": 1}, {"key": "k", "value": 2}]],
    ),
    "no text": (
        pa.array([b"a", b"\xff"]).view(pa.string()),
        ["a", b"\xff"],
    ),
    "category": (pa.array(["x", None]).dictionary_encode(), ["x", None]),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("use_dictionary", [True, False])
def test_odd_values_come_as_python_has_them_or_as_text(name: str, use_dictionary: bool) -> None:
    column, expected = ODD[name]
    rows = rows_of(pa.table({name: column}), use_dictionary=use_dictionary)
    assert [row[name] for row in rows] == expected


def test_not_a_number_stays_so() -> None:
    (row,) = rows_of(pa.table({"x": pa.array([math.nan])}))
    assert math.isnan(row["x"])


def test_rows_come_in_order_over_row_groups_with_the_asked_columns_alone() -> None:
    table = pa.table({"a": range(5_000), "b": ["x" * 300] * 5_000, "c": range(5_000)})
    rows = rows_of(table, ["c", "a"], row_group_size=900)
    assert rows == [{"a": number, "c": number} for number in range(5_000)]
    assert rows_of(table, [], row_group_size=900) == [{}] * 5_000


def test_columns_that_are_not_asked_for_are_not_fetched() -> None:
    class Counting(io.BytesIO):
        num_bytes = 0

        def read(self, size: int | None = -1) -> bytes:
            content = super().read(size)
            self.num_bytes += len(content)
            return content

    table = pa.table({"a": range(100), "wide": [bytes([n]) * 50_000 for n in range(100)]})
    file = Counting(file_of(table, compression="none", use_dictionary=False).getvalue())
    with ParquetRows(file, "s3://b/t") as rows:
        assert len(list(rows.rows(["a"]))) == 100
    assert file.num_bytes < 200_000


def test_a_long_text_that_many_rows_share_is_not_unpacked_for_all_of_them() -> None:
    before = pa.total_allocated_bytes()
    table = pa.table({"a": pa.array(["x" * 1_000_000] * 2_000).dictionary_encode()})
    with ParquetRows(file_of(table), "s3://b/t") as rows:
        for row in rows.rows(["a"]):
            assert len(row["a"]) == 1_000_000
            assert pa.total_allocated_bytes() - before < 200 << 20


def damaged(kind: str) -> bytes:
    content = bytearray(
        file_of(pa.table({"a": ["some text " * 20 + str(n) for n in range(2_000)]})).getvalue()
    )
    if kind == "cut off":
        return bytes(content[:-200])
    if kind == "two columns":
        table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
        return file_of(table).getvalue()
    if kind in ("column name", "field name"):
        names = {"column name": pa.table({"QQQQ": ["a"]}), "field name": pa.table({"a": [{"QQQQ": "a"}]})}
        return file_of(names[kind]).getvalue().replace(b"QQQQ", b"Q\xff\xfeQ")
    if kind == "encrypted":
        return b"PARE" + bytes(content[4:])
    content[200:3_000] = b"\xff" * 2_800
    return bytes(content)


@pytest.mark.parametrize(("kind", "reason"), [
    ("cut off", r"damaged or cut off \(footer\)"),
    ("page", r"damaged or cut off \(row group 1 of 1\)"),
    ("encrypted", "is encrypted"),
    ("two columns", "has the column a twice"),
    ("column name", "a column whose name is not UTF-8"),
    ("field name", "a column whose name is not UTF-8"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_a_source_error(kind: str, reason: str) -> None:
    with pytest.raises(SourceError, match=reason), ParquetRows(io.BytesIO(damaged(kind)), "s3://b/t") as rows:
        list(rows.rows(["a"]))


def test_errors_of_the_file_itself_pass_through() -> None:
    class Changing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() < 1_000 and (size or 0) > 4:
                raise SourceError("It changed.")
            return super().read(size)

    content = file_of(pa.table({"a": [str(n) * 10 for n in range(9_000)]})).getvalue()
    with ParquetRows(Changing(content), "s3://b/t") as rows, pytest.raises(SourceError, match="It changed"):
        list(rows.rows(["a"]))
