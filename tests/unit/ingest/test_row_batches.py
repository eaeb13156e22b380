"""Rows of a query come in batches of bounded size."""

from flows.ingest.items import read_rows
from flows.ingest.template import RowTemplate, TemplateOptions


def batch_sizes(num_rows: int, num_chars: int) -> list[int]:
    template = RowTemplate(TemplateOptions("{{ body }}", None, None, 8, 0.0))
    rows = ({"body": "x" * num_chars} for _ in range(num_rows))
    return [len(batch) for batch in read_rows("sql:1", rows, template)]


def test_small_rows_come_a_thousand_at_a_time() -> None:
    assert batch_sizes(2_500, 10) == [1_000, 1_000, 500]


def test_large_rows_come_a_megabyte_at_a_time() -> None:
    assert batch_sizes(7, 500_000) == [3, 3, 1]


def test_a_query_without_rows_has_no_batch() -> None:
    assert batch_sizes(0, 1) == []
