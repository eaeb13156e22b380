import secrets
import tracemalloc
from collections.abc import Generator
from datetime import date
from urllib.parse import urlsplit

import psycopg
import pytest

from blend_core.errors import SourceError, SourceUnavailableError
from storage.sql_source import stream_rows

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def source_url(postgres_url: str) -> str:
    with psycopg.connect(postgres_url) as connection:
        connection.execute(
            "CREATE TABLE review AS SELECT n AS id, 'text ' || n AS body FROM generate_series(1, 5000) n"
        )
        connection.execute(
            "CREATE FUNCTION sneaky() RETURNS integer LANGUAGE sql AS 'DELETE FROM review RETURNING 1'"
        )
    return postgres_url


def num_rows(url: str) -> int:
    return sum(1 for _ in stream_rows(url, "SELECT id FROM review"))


def test_rows_are_streamed_in_the_order_of_the_query(source_url: str) -> None:
    rows = list(stream_rows(source_url, "SELECT id, body FROM review ORDER BY id DESC"))
    assert len(rows) == 5_000
    assert rows[0] == {"id": 5_000, "body": "text 5000"}
    first = next(stream_rows(source_url, "SELECT count(*) AS n FROM review WHERE body LIKE 'text 1%'"))
    assert first["n"] == 1_111


def test_rows_of_any_size_are_read_one_at_a_time(source_url: str) -> None:
    query = "SELECT n, repeat('x', 20000000) AS body FROM generate_series(1, 20) n"
    tracemalloc.start()
    try:
        sizes = [len(row["body"]) for row in stream_rows(source_url, query)]
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sizes == [20_000_000] * 20
    assert peak_bytes < 100_000_000


def test_a_query_that_is_given_up_leaves_no_transaction_behind(source_url: str) -> None:
    rows = stream_rows(source_url, "SELECT n FROM generate_series(1, 10000000) n")
    assert next(rows) == {"n": 1}
    assert isinstance(rows, Generator)
    rows.close()
    with psycopg.connect(source_url) as connection:
        others = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'FETCH%'"
            " AND state <> 'idle'"
        )
        assert others.fetchone() == (0,)


def test_parameters_are_bound_and_not_pasted(source_url: str) -> None:
    query = "SELECT %(logical_date)s::date AS day, %(evil)s AS text"
    rows = list(
        stream_rows(source_url, query, {"logical_date": date(2026, 3, 1), "evil": "'; DROP TABLE review"})
    )
    assert rows == [{"day": date(2026, 3, 1), "text": "'; DROP TABLE review"}]
    assert num_rows(source_url) == 5_000


@pytest.mark.parametrize("query", [
    "DELETE FROM review",
    "INSERT INTO review VALUES (1, 'x') RETURNING id",
    "WITH gone AS (DELETE FROM review RETURNING id) SELECT * FROM gone",
    "SELECT 1; DELETE FROM review",
    "SELECT 1; COMMIT; DELETE FROM review",
    "SELECT sneaky()",
    "SELECT set_config('transaction_read_only', 'off', false), sneaky()",
    "DROP TABLE review",
    "",
])  # fmt: skip
def test_a_query_that_does_more_than_read_is_refused_by_the_server(source_url: str, query: str) -> None:
    with pytest.raises(SourceError):
        list(stream_rows(source_url, query))
    assert num_rows(source_url) == 5_000


@pytest.mark.parametrize(("query", "reason"), [
    ("SELECT nothing FROM review", 'column "nothing" does not exist'),
    ("SELECT * FROM nowhere", 'relation "nowhere" does not exist'),
    ("SELECT 1 / (id - 3) FROM review", "division by zero"),
    ("SELECT id, body AS id FROM review", "the column id twice"),
    ("SELECT body::integer FROM review", r"\(invalid input syntax for type integer\); correct it"),
])  # fmt: skip
def test_a_wrong_query_is_refused_with_the_servers_own_reason(
    source_url: str, query: str, reason: str
) -> None:
    with pytest.raises(SourceError, match=reason) as caught:
        list(stream_rows(source_url, query))
    assert not caught.value.retryable


def test_a_server_that_is_not_there_may_be_tried_again(closed_port: int) -> None:
    with pytest.raises(SourceUnavailableError) as caught:
        list(stream_rows(f"postgresql://me:secret@127.0.0.1:{closed_port}/x", "SELECT 1"))
    assert "secret" not in str(caught.value)


def test_a_server_without_a_free_connection_may_be_tried_again(source_url: str) -> None:
    make_run_out(source_url, "53300", "too many connections within")
    crowded = url_of_a_role(source_url, "CONNECTION LIMIT 0")
    for url, reason in ((source_url, "too many connections within"), (crowded, "too many connections for")):
        with pytest.raises(SourceUnavailableError, match=rf"has no connection left \({reason}"):
            list(stream_rows(url, "SELECT run_out()"))


@pytest.mark.parametrize(
    ("sqlstate", "told"),
    [
        ("53000", "insufficient resources"),
        ("53100", "could not write to file"),
        ("53200", "out of memory"),
        ("53400", "temporary file size exceeds temp_file_limit"),
    ],
)
def test_a_query_that_needs_more_than_its_server_has_is_not_tried_again(
    source_url: str, sqlstate: str, told: str
) -> None:
    make_run_out(source_url, sqlstate, told)
    with pytest.raises(SourceError, match=rf"run out of what the query needs \({told}\)") as caught:
        list(stream_rows(source_url, "SELECT run_out()"))
    assert not caught.value.retryable


def test_the_servers_own_limit_on_temporary_files_is_told(source_url: str) -> None:
    limited = url_of_a_role(source_url, "", temp_file_limit="0", work_mem="64kB")
    with pytest.raises(SourceError, match=r"\(temporary file size exceeds") as caught:
        list(stream_rows(limited, "SELECT n FROM generate_series(1, 100000) AS n ORDER BY -n"))
    assert not caught.value.retryable


def url_of_a_role(url: str, options: str, **settings: str) -> str:
    """Makes a login of its own; returns the URL with it."""
    role = f"role_{secrets.token_hex(4)}"
    with psycopg.connect(url) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x' {options}")
        for name, value in settings.items():
            connection.execute(f"ALTER ROLE {role} SET {name} = '{value}'")
    parts = urlsplit(url)
    return parts._replace(netloc=f"{role}:x@{parts.hostname}:{parts.port}").geturl()


def make_run_out(url: str, sqlstate: str, told: str) -> None:
    """Makes the function `run_out()`, which fails as a server does that has run out of something."""
    with psycopg.connect(url) as connection:
        connection.execute(
            "CREATE OR REPLACE FUNCTION run_out() RETURNS integer LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{told}' USING ERRCODE = '{sqlstate}'; END $$"
        )


def test_a_wrong_password_is_told_without_it(source_url: str) -> None:
    parts = urlsplit(source_url)
    url = parts._replace(netloc=f"{parts.username}:secret@{parts.hostname}:{parts.port}").geturl()
    with pytest.raises(SourceError, match="user or password") as caught:
        list(stream_rows(url, "SELECT 1"))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("value", "text"), [
    ("date '0044-03-15 BC'", "0044-03-15 BC"),
    ("'infinity'::date", "infinity"),
    ("'infinity'::timestamptz", "infinity"),
    ("timestamp '20000-01-01 10:00'", "20000-01-01 10:00:00"),
    ("time '24:00'", "24:00:00"),
    ("interval '2000000000 days'", "2000000000 days"),
    ("array['-infinity'::date]", ["-infinity"]),
])  # fmt: skip
def test_a_value_that_python_cannot_hold_comes_as_the_servers_text(
    source_url: str, value: str, text: object
) -> None:
    query = f"SELECT {value} AS at UNION ALL SELECT NULL"
    rows = list(stream_rows(source_url, query))
    assert [row["at"] for row in rows] == [text, None]


def test_json_deeper_than_python_reads_comes_as_text(source_url: str) -> None:
    query = "SELECT (repeat('[', 2000) || repeat(']', 2000))::jsonb AS deep, '{\"a\": 1}'::jsonb AS plain"
    assert list(stream_rows(source_url, query)) == [{"deep": "[" * 2000 + "]" * 2000, "plain": {"a": 1}}]
