"""The logical date in addresses, queries and names."""

from datetime import UTC, date, datetime

import pytest

from blend_core.errors import ConfigurationError
from flows.dates import fill_query, fill_text, local_date, parse_date
from flows.job_spec import BatchJobSpec, dated, parse_job

DAY = date(2026, 3, 1)


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("s3://bucket/day={logical_date}/", "s3://bucket/day=2026-03-01/"),
        ("s3://bucket/{logical_date:%Y/%m/%d}/part-*", "s3://bucket/2026/03/01/part-*"),
        ("s3://bucket/{logical_date-1}/", "s3://bucket/2026-02-28/"),
        ("week {logical_date+7:%G-W%V}", "week 2026-W10"),
        ('{"a": {}} {{ body }} {other}', '{"a": {}} {{ body }} {other}'),
    ],
)
def test_a_day_is_filled_in_and_other_braces_stay(text: str, filled: str) -> None:
    assert fill_text(text, DAY) == filled


def test_in_sql_the_day_is_a_literal() -> None:
    assert fill_query("SELECT {logical_date} - 1, 10 % 3", DAY) == "SELECT '2026-03-01'::date - 1, 10 % 3"
    assert fill_query("SELECT {logical_date:%Y%m%d}", DAY) == "SELECT '20260301'"


def test_no_format_can_end_the_literal() -> None:
    query = fill_query("SELECT {logical_date:%Y'; DROP TABLE t; --}", DAY)
    assert query == "SELECT '2026''; DROP TABLE t; --'"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"s3": ["s3://b/{logical_date:%H}/"]}, r"s3\.0: .*%H, which a day does not have"),
        ({"parquet": [{"uri": "s3://b/{logical_date:%H}/", "prompt": "x"}]}, r"parquet\.0\.uri: .*%H"),
        ({"s3": ["s3://b/{logicaldate}/"]}, r"s3\.0: \{logicaldate\} is not understood"),
        ({"s3": ["s3://b/{logical_date:%}/"]}, r"s3\.0: .* a day does not have"),
        ({"s3": ["s3://b/k"], "name": "n {logical_date:%b}"}, "name: .*%b"),
        (
            {"sql": [{"query": "SELECT '{logical_date}'", "prompt": "x"}]},
            "query: .* becomes a quoted literal by itself",
        ),
    ],
)
def test_a_placeholder_that_cannot_be_filled_is_refused_by_its_field(
    content: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        parse_job(content, origin="job.yaml")


def test_a_job_of_a_day_has_it_in_addresses_queries_name_and_table() -> None:
    spec = BatchJobSpec.model_validate(
        {
            "name": "tickets {logical_date}",
            "s3": ["s3://b/{logical_date}/"],
            "parquet": [{"uri": "s3://t/{logical_date:%Y%m}/", "prompt": "x"}],
            "sql": [{"query": "SELECT * FROM t WHERE day = {logical_date}", "prompt": "{{ logical_date }}"}],
            "write_back": {"connection": "shop", "table": "t_{logical_date:%Y%m}", "key_column": "id"},
        }
    )
    job = dated(spec, DAY)
    assert (job.name, job.s3) == ("tickets 2026-03-01", ["s3://b/2026-03-01/"])
    assert job.parquet[0].uri == "s3://t/202603/"
    assert job.sql[0].query == "SELECT * FROM t WHERE day = '2026-03-01'::date"
    assert job.sql[0].prompt == "{{ logical_date }}"
    assert job.write_back is not None
    assert job.write_back.table == "t_202603"
    assert spec.name == "tickets {logical_date}"


@pytest.mark.parametrize("text", ["2026-2-30", "2026-02-30", "yesterday", "20260228", ""])
def test_what_is_no_day_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--from .* write it as 2026-11-28"):
        parse_date(text, "--from")


def test_the_day_is_that_of_the_zone() -> None:
    instant = datetime(2026, 11, 28, 23, 30, tzinfo=UTC)
    assert local_date(instant, "Europe/Berlin") == date(2026, 11, 29)
    assert local_date(instant, "America/New_York") == date(2026, 11, 28)
    with pytest.raises(ConfigurationError, match="no time zone 'Middle/Earth'"):
        local_date(instant, "Middle/Earth")


def test_what_remembers_needs_a_name_of_its_own_and_ids() -> None:
    with pytest.raises(ConfigurationError, match="remembered under the job's `name`"):
        parse_job({"s3": ["s3://b/k/"], "s3_only_new": True}, origin="job.yaml")
    source = {"query": "SELECT 1", "prompt": "x", "watermark_column": "at", "id_column": None}
    with pytest.raises(ConfigurationError, match="needs an `id_column`"):
        parse_job({"name": "n", "sql": [source]}, origin="job.yaml")


def test_a_column_that_takes_two_things_is_refused() -> None:
    write_back = {"connection": "c", "table": "t", "key_column": "id", "columns": {"text": "a", "error": "a"}}
    with pytest.raises(ConfigurationError, match="column 'a' is named twice"):
        parse_job({"s3": ["s3://b/k"], "write_back": write_back}, origin="job.yaml")
