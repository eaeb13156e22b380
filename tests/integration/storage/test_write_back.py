"""Results in a table of the user's, by upsert."""

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from blend_core.errors import ConfigurationError, StaleRunError, StorageError, StorageUnavailableError
from storage.results import ResultRow
from storage.target_table import WriteBackTarget, target_columns, upsert_statement
from storage.write_back import WriteBackCounts, check_target, write_results

pytestmark = pytest.mark.postgres

FINISHED_AT = datetime(2026, 11, 29, 2, 30, tzinfo=UTC)
FIELDS = ("text", "status", "error", "model", "job_id", "finished_at")


def row(custom_id: str | None, text: str | None = "yes", **values: Any) -> ResultRow:
    base = dict.fromkeys(ResultRow.__slots__)
    given = {
        "seq": 0,
        "custom_id": custom_id,
        "output_text": text,
        "status": "succeeded",
        "finished_at": FINISHED_AT,
    }
    return ResultRow(**(base | given | values))


class Table:
    """A table of the user's."""

    def __init__(self, url: str, columns: str, fields: dict[str, str] | None = None, key: str = "id") -> None:
        self.url = url
        name = f"Answer {secrets.token_hex(4)}"
        self.execute(sql.SQL("CREATE TABLE {} ({})").format(sql.Identifier(name), sql.SQL(columns)))
        self.target = WriteBackTarget(url, name, key, fields or {name: name for name in FIELDS})

    def execute(self, statement: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def rows(self, what: str = "*", where: str = "true") -> list[tuple[Any, ...]]:
        name = sql.Identifier(self.target.table)
        statement = sql.SQL("SELECT {} FROM {} WHERE {} ORDER BY 1")
        return self.execute(statement.format(sql.SQL(what), name, sql.SQL(where)))

    def run(self, statement: str) -> None:
        self.execute(sql.SQL(statement).format(sql.Identifier(self.target.table)))

    def write(self, *rows: ResultRow) -> WriteBackCounts:
        return write(self.target, rows)


def write(target: WriteBackTarget, rows: Iterable[ResultRow]) -> WriteBackCounts:
    counts = WriteBackCounts()
    write_results(target, "job_x", "tiny", rows, counts, before_batch=lambda: None, may_wait=lambda: True)
    return counts


ALL_COLUMNS = "id int PRIMARY KEY, text text, status text, error text, model text, job_id text, "


@pytest.fixture
def table(postgres_url: str) -> Table:
    return Table(postgres_url, ALL_COLUMNS + "finished_at timestamptz, note text DEFAULT 'mine'")


def test_every_result_is_a_row_and_writing_again_changes_nothing(table: Table) -> None:
    rows = (row("1"), row("2", None, status="errored", error_message="The prompt is empty."))
    for _ in range(2):
        counts = table.write(*rows)
        assert counts == WriteBackCounts(num_written=2)
        assert table.rows() == [
            (1, "yes", "succeeded", None, "tiny", "job_x", FINISHED_AT, "mine"),
            (2, None, "errored", "The prompt is empty.", "tiny", "job_x", FINISHED_AT, "mine"),
        ]


def test_a_row_that_is_there_keeps_its_other_columns(postgres_url: str) -> None:
    table = Table(
        postgres_url, "id bigint PRIMARY KEY, body text NOT NULL, summary text", {"text": "summary"}
    )
    table.run("INSERT INTO {} VALUES (1, 'long text'), (2, 'another')")
    table.write(row("1", "short"), row("2", None, status="errored", error_message="x"))
    assert table.rows() == [(1, "long text", "short"), (2, "another", None)]


def test_an_answer_is_not_replaced_by_an_error_that_no_column_takes(postgres_url: str) -> None:
    table = Table(postgres_url, "id text PRIMARY KEY, summary text", {"text": "summary"})
    table.write(row("a", "good"))
    assert table.write(row("a", None, status="expired", error_message="late")).num_written == 0
    assert table.rows() == [("a", "good")]


def test_many_rows_are_written_in_batches(table: Table) -> None:
    def results() -> Iterator[ResultRow]:
        for number in range(1_234):
            yield row(str(number), f"answer {number}")

    assert write(table.target, results()).num_written == 1_234
    assert table.rows("count(*), count(DISTINCT text)") == [(1_234, 1_234)]


def test_a_write_that_was_killed_is_completed_by_the_next(table: Table) -> None:
    class Killed(BaseException):
        pass

    def results() -> Iterator[ResultRow]:
        yield from (row(str(number)) for number in range(700))
        raise Killed

    with pytest.raises(Killed):
        write(table.target, results())
    assert table.rows("count(*)") == [(500,)]
    table.write(*(row(str(number)) for number in range(700)))
    assert table.rows("count(*)") == [(700,)]


def test_what_is_raised_before_a_batch_leaves_that_batch_unwritten(table: Table) -> None:
    left = [None, StaleRunError("Another run took over.")]

    def before_batch() -> None:
        error = left.pop(0)
        if error is not None:
            raise error

    rows = [row(str(number)) for number in range(700)]
    counts = WriteBackCounts()
    with pytest.raises(StaleRunError):
        write_results(
            table.target, "job_x", "tiny", rows, counts, before_batch=before_batch, may_wait=lambda: True
        )
    assert table.rows("count(*)") == [(500,)]
    assert counts == WriteBackCounts(num_written=500)


def test_ids_of_the_wrong_type_are_told_and_take_no_other_with_them(table: Table) -> None:
    counts = table.write(row("chat-1"), row("7"), row("99999999999"), row("8"))
    assert (counts.num_written, counts.num_refused) == (2, 2)
    assert "'chat-1' (invalid input syntax for type integer)" in str(counts.refusal("t"))
    assert "'99999999999'" in str(counts.refusal("t"))
    assert [found[0] for found in table.rows()] == [7, 8]


def test_a_text_that_is_too_long_is_refused_and_not_cut(postgres_url: str) -> None:
    table = Table(postgres_url, "id text PRIMARY KEY, summary varchar(5)", {"text": "summary"})
    counts = table.write(row("a", "12345"), row("b", "123456"))
    assert (counts.num_written, counts.num_refused) == (1, 1)
    assert "value too long" in str(counts.refusal("t"))
    assert table.rows() == [("a", "12345")]


def test_a_constraint_that_is_checked_at_commit_refuses_its_own_row_alone(postgres_url: str) -> None:
    columns = "id int PRIMARY KEY, summary text UNIQUE DEFERRABLE INITIALLY DEFERRED"
    table = Table(postgres_url, columns, {"text": "summary"})
    table.run("INSERT INTO {} VALUES (1, 'taken')")
    counts = table.write(row("2", "free"), row("3", "taken"), row("4", "free, too"))
    assert (counts.num_written, counts.num_refused) == (2, 1)
    assert "'3' (duplicate key value violates unique constraint" in str(counts.refusal("t"))
    assert table.rows() == [(1, "taken"), (2, "free"), (4, "free, too")]


@pytest.mark.parametrize("sqlstate", ["42501", "42P01", "54000", "55000", "58000", "08001", "P0001"])
def test_whatever_a_trigger_says_of_a_row_refuses_that_row_alone(table: Table, sqlstate: str) -> None:
    function = f"refuse_{secrets.token_hex(4)}"
    table.execute(
        f"CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF NEW.id = 3 THEN RAISE EXCEPTION 'not this one' USING ERRCODE = '{sqlstate}'; END IF;"
        " RETURN NEW; END $$"
    )
    table.run(f"CREATE TRIGGER choosy BEFORE INSERT ON {{}} FOR EACH ROW EXECUTE FUNCTION {function}()")

    counts = table.write(*(row(str(number)) for number in range(6)))

    assert (counts.num_written, counts.num_refused) == (5, 1)
    assert "'3' (not this one)" in str(counts.refusal("t"))
    assert [found[0] for found in table.rows()] == [0, 1, 2, 4, 5]


def test_a_row_that_a_policy_forbids_is_refused_alone(table: Table, postgres_url: str) -> None:
    target = as_another_role(table, postgres_url, "SELECT, INSERT, UPDATE")
    table.run("ALTER TABLE {} ENABLE ROW LEVEL SECURITY")
    table.run("CREATE POLICY most ON {} USING (true) WITH CHECK (id <> 3)")
    table.run("INSERT INTO {} (id) VALUES (1), (3)")

    counts = write(target, [row(str(number)) for number in range(6)])

    assert (counts.num_written, counts.num_refused) == (5, 1)
    assert "'3' (new row violates row-level security policy" in str(counts.refusal("t"))
    assert table.rows("id, text") == [(0, "yes"), (1, "yes"), (2, "yes"), (3, None), (4, "yes"), (5, "yes")]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("DROP TABLE {}", "cannot be written \\(relation"),
        ("ALTER TABLE {} DROP COLUMN text", "cannot be written \\(column"),
        ("ALTER TABLE {} DROP CONSTRAINT {pkey}", "cannot be written \\(there is no unique"),
        ("REVOKE INSERT ON {} FROM {role}", "cannot be written \\(permission denied"),
    ],
)
def test_a_table_that_changes_so_that_it_takes_no_row_stops_the_writing(
    table: Table, postgres_url: str, change: str, told: str
) -> None:
    target = as_another_role(table, postgres_url, "SELECT, INSERT, UPDATE")
    role = urlsplit(target.url).username
    names = {"role": sql.Identifier(role or ""), "pkey": sql.Identifier(f"{target.table}_pkey")}
    statements = [sql.SQL("SELECT"), sql.SQL(change).format(sql.Identifier(target.table), **names)]

    with pytest.raises(StorageError, match=told) as caught:
        write_results(
            target,
            "job_x",
            "tiny",
            [row(str(number)) for number in range(1_000)],
            WriteBackCounts(),
            before_batch=lambda: table.execute(statements.pop(0)) and None,
            may_wait=lambda: True,
        )
    assert not caught.value.retryable


def test_a_table_that_refuses_row_after_row_stops_the_writing(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.write_back._BATCH_ROWS", 50)
    tries = []

    def before_batch() -> None:
        tries.append(1)
        if len(tries) == 2:
            table.run("ALTER TABLE {} ADD COLUMN owner text NOT NULL DEFAULT 'me'")
            table.run("ALTER TABLE {} ALTER COLUMN owner DROP DEFAULT")

    counts = WriteBackCounts()
    with pytest.raises(StorageError) as caught:
        write_results(
            table.target,
            "job_x",
            "tiny",
            (row(str(number)) for number in range(200)),
            counts,
            before_batch=before_batch,
            may_wait=lambda: True,
        )

    assert str(caught.value) == (
        f"{table.target.table} refused 50 results one after another, first '50' (null value in column "
        f'"owner" of relation "{table.target.table}" violates not-null constraint), and no more were tried; '
        "correct the table, then write back again."
    )
    assert len(tries) == 2
    assert (counts.num_written, counts.num_refused, counts.num_dropped) == (50, 50, 0)
    assert table.rows("count(*)") == [(50,)]


def test_rows_refused_in_several_small_batches_stop_the_writing_too(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.write_back._BATCH_ROWS", 50)
    monkeypatch.setattr("storage.write_back._BATCH_CHARS", 100)
    table = Table(postgres_url, "id int PRIMARY KEY, text varchar(1)", {"text": "text"})
    long = [row(str(number), "x" * 10) for number in range(200)]
    counts = WriteBackCounts()

    def write_all(rows: list[ResultRow]) -> None:
        write_results(
            table.target, "job_x", "tiny", rows, counts, before_batch=lambda: None, may_wait=lambda: True
        )

    write_all([*long[:45], row("45", "y"), *long[46:90]])
    assert (counts.num_written, counts.num_refused) == (1, 89)
    with pytest.raises(
        StorageError, match="refused 50 results one after another, first '0' \\(value too long"
    ):
        write_all(long)
    assert (counts.num_written, counts.num_refused) == (1, 139)


def as_another_role(table: Table, postgres_url: str, rights: str) -> WriteBackTarget:
    """The table for a login that has these rights and owns nothing."""
    role = f"writer_{secrets.token_hex(4)}"
    table.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
    table.run(f"GRANT {rights} ON {{}} TO {role}")
    parts = urlsplit(postgres_url)
    url = parts._replace(netloc=f"{role}:x@{parts.hostname}:{parts.port}").geturl()
    return replace(table.target, url=url)


def test_requests_without_an_id_of_their_own_have_no_row(table: Table) -> None:
    repeated = row("1", None, status="errored", error_code="duplicate_custom_id", error_message="x")
    counts = table.write(row(None), row("1", "first"), repeated)
    assert (counts.num_written, counts.num_without_key) == (1, 2)
    assert table.rows("id, text") == [(1, "first")]


@pytest.mark.parametrize("before", ["TRUNCATE {}", "INSERT INTO {} (id) VALUES (1), (2)"])
def test_ids_that_are_one_key_are_written_one_after_another(table: Table, before: str) -> None:
    table.run(before)
    counts = table.write(row("1", "a"), row("2", "b"), row("01", "c"), row("x"))
    assert (counts.num_written, counts.num_refused, counts.num_dropped) == (3, 1, 0)
    assert table.rows("id, text") == [(1, "c"), (2, "b")]


@pytest.mark.parametrize("before", ["TRUNCATE {}", "INSERT INTO {} (id) VALUES (3), (4)"])
def test_what_a_trigger_drops_is_counted_as_that(table: Table, before: str) -> None:
    table.run(before)
    function = f"drop_{secrets.token_hex(4)}"
    table.execute(
        f"CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF NEW.id = 3 THEN RETURN NULL; END IF; RETURN NEW; END $$"
    )
    table.run(f"CREATE TRIGGER d BEFORE INSERT OR UPDATE ON {{}} FOR EACH ROW EXECUTE FUNCTION {function}()")
    counts = table.write(row(None), *(row(str(number)) for number in range(6)), row("x"))
    assert (
        counts.refusal("t")
        == "t refused 'x' (invalid input syntax for type integer); correct the table or the ids."
    )
    counts.refused.clear()
    assert counts == WriteBackCounts(num_written=5, num_refused=1, num_dropped=1, num_without_key=1)
    assert len(table.rows("id", "text = 'yes'")) == 5


def test_a_key_that_the_table_makes_itself_is_written(postgres_url: str) -> None:
    columns = "id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, text text"
    table = Table(postgres_url, columns, {"text": "text"})
    table.run("INSERT INTO {} (text) VALUES ('old')")
    check_target(table.target)
    assert table.write(row("1", "first"), row("7", "seventh")).num_written == 2
    assert table.rows("id, text") == [(1, "first"), (7, "seventh")]


def test_names_cannot_break_out_of_the_statement(postgres_url: str) -> None:
    key, column = 'k"; DROP TABLE x; --', "50% {of} %s"
    table = Table(
        postgres_url,
        sql.SQL("{} uuid UNIQUE, {} text")
        .format(sql.Identifier(key), sql.Identifier(column))
        .as_string(None),
        {"text": column},
        key,
    )
    table.write(row("0190a000-0000-7000-8000-000000000001", "'); DROP TABLE x; --"))
    assert len(table.rows()) == 1


def test_a_status_may_be_an_enumeration_and_a_table_in_a_schema(postgres_url: str) -> None:
    table = Table(postgres_url, "id text")
    name = f"own_{secrets.token_hex(4)}"
    table.execute(f"CREATE SCHEMA {name}")
    table.execute(f"CREATE TYPE {name}.state AS ENUM ('succeeded', 'errored')")
    table.execute(f"CREATE TABLE {name}.t (id text PRIMARY KEY, state {name}.state)")
    target = replace(table.target, table=f"{name}.t", columns={"status": "state"})
    check_target(target)
    counts = write(target, [row("a"), row("b", status="expired")])
    assert (counts.num_written, counts.num_refused) == (1, 1)
    assert table.execute(f"SELECT * FROM {name}.t") == [("a", "succeeded")]


@pytest.fixture
def short_lock_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.write_back._LOCK_TIMEOUT_MS", 50)


@contextmanager
def locked(table: Table, statement: str) -> Iterator[psycopg.Connection]:
    """The table while another transaction has done the statement and goes on."""
    with psycopg.connect(table.url) as connection:
        connection.execute(sql.SQL(statement).format(sql.Identifier(table.target.table)))
        yield connection
        connection.rollback()


LOCKS = ["LOCK {} IN EXCLUSIVE MODE", "UPDATE {} SET note = 'being edited' WHERE id = 2"]


@pytest.mark.usefixtures("short_lock_waits")
@pytest.mark.parametrize("lock", LOCKS)
def test_a_table_that_is_locked_is_waited_for_and_ownership_asked_again(table: Table, lock: str) -> None:
    table.write(row("2", "old"))
    counts, asked = WriteBackCounts(), []
    with locked(table, lock) as other:

        def may_wait() -> bool:
            other.rollback()
            return True

        write_results(
            table.target,
            "job_x",
            "tiny",
            [row("1"), row("2"), row("x")],
            counts,
            before_batch=lambda: asked.append(1),
            may_wait=may_wait,
        )
    assert (counts.num_written, counts.num_refused) == (2, 1)
    assert len(asked) == 2
    assert table.rows("id, text") == [(1, "yes"), (2, "yes")]


@pytest.mark.usefixtures("short_lock_waits")
@pytest.mark.parametrize("lock", LOCKS)
@pytest.mark.parametrize("is_told_to_end", [True, False])
def test_a_table_that_stays_locked_is_told(table: Table, lock: str, is_told_to_end: bool) -> None:
    table.write(row("2", "old"))
    counts, asked = WriteBackCounts(), []
    with locked(table, lock), pytest.raises(StorageUnavailableError) as caught:
        write_results(
            table.target,
            "job_x",
            "tiny",
            [row("1"), row("2")],
            counts,
            before_batch=lambda: asked.append(1),
            may_wait=lambda: not is_told_to_end,
        )
    assert str(caught.value) == (
        f"{table.target.table} is locked by another transaction; end that one and write back again."
    )
    assert counts == WriteBackCounts()
    assert len(asked) == (1 if is_told_to_end else 12)
    assert table.rows("id, text") == [(2, "old")]


@pytest.fixture
def slow_table(table: Table, monkeypatch: pytest.MonkeyPatch) -> Table:
    """A table whose trigger takes as many seconds for a row as its text says, where a statement has 1 s."""
    monkeypatch.setattr("storage.write_back._STATEMENT_TIMEOUT_MS", 1_000)
    function = f"sleep_{secrets.token_hex(4)}"
    table.execute(
        f"CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM pg_sleep(NEW.text::float); RETURN NEW; END $$"
    )
    table.run(f"CREATE TRIGGER slow BEFORE INSERT ON {{}} FOR EACH ROW EXECUTE FUNCTION {function}()")
    return table


def test_rows_that_take_too_long_together_are_written_in_parts(slow_table: Table) -> None:
    counts = slow_table.write(*(row(str(number), "0.1") for number in range(20)))
    assert counts == WriteBackCounts(num_written=20)
    assert slow_table.rows("count(*)") == [(20,)]


def test_a_row_that_takes_too_long_alone_is_refused_alone(slow_table: Table) -> None:
    counts = slow_table.write(*(row(str(number), "5" if number == 3 else "0") for number in range(6)))
    assert (counts.num_written, counts.num_refused) == (5, 1)
    assert "'3' (canceling statement due to statement timeout)" in str(counts.refusal("t"))
    assert [found[0] for found in slow_table.rows()] == [0, 1, 2, 4, 5]


def test_a_table_where_row_after_row_takes_too_long_stops_the_writing(
    slow_table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.write_back._MAX_LATE_ROWS", 2)
    counts = WriteBackCounts()
    with pytest.raises(StorageUnavailableError, match=r"took longer than .* make its triggers faster"):
        write_results(
            slow_table.target,
            "job_x",
            "tiny",
            [row(str(number), "0" if number == 0 else "5") for number in range(8)],
            counts,
            before_batch=lambda: None,
            may_wait=lambda: True,
        )
    assert (counts.num_written, counts.num_refused) == (1, 2)


def test_a_run_that_is_told_to_end_does_not_try_slow_rows_in_parts(slow_table: Table) -> None:
    tries: list[int] = []
    with pytest.raises(StorageUnavailableError, match="took longer than"):
        write_results(
            slow_table.target,
            "job_x",
            "tiny",
            [row("1", "5"), row("2", "5")],
            WriteBackCounts(),
            before_batch=lambda: tries.append(1),
            may_wait=lambda: False,
        )
    assert len(tries) == 1


@pytest.mark.parametrize(
    ("columns", "fields", "reason"),
    [
        ("id int PRIMARY KEY", {"text": "summary"}, "has no column summary; add it"),
        ("name int PRIMARY KEY, summary text", {"text": "summary"}, "has no column id;"),
        ("id int, summary text", {"text": "summary"}, "id is not unique"),
        ("id int, summary text, UNIQUE (id, summary)", {"text": "summary"}, "id is not unique"),
        ("id int PRIMARY KEY, n int", {"text": "n"}, "n is of type integer and cannot take `text`"),
        ("id int PRIMARY KEY, n bool", {"finished_at": "n"}, "boolean and cannot take `finished_at`"),
        (
            "id int PRIMARY KEY, a text, b text GENERATED ALWAYS AS (upper(a)) STORED",
            {"text": "b"},
            "b is generated",
        ),
        (
            "id int PRIMARY KEY, b int GENERATED ALWAYS AS IDENTITY UNIQUE",
            {"text": "b"},
            "b is generated",
        ),
    ],
)
def test_a_table_that_cannot_take_results_is_told_beforehand(
    postgres_url: str, columns: str, fields: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        check_target(Table(postgres_url, columns, fields).target)


def test_a_unique_index_that_could_not_be_built_is_none(postgres_url: str) -> None:
    table = Table(postgres_url, "id text, summary text", {"text": "summary"})
    table.run("INSERT INTO {} (id) VALUES ('1'), ('1')")
    make_index = sql.SQL("CREATE UNIQUE INDEX CONCURRENTLY ON {} (id)").format(
        sql.Identifier(table.target.table)
    )
    with (
        psycopg.connect(table.url, autocommit=True) as connection,
        pytest.raises(psycopg.errors.UniqueViolation),
    ):
        connection.execute(make_index)
    with pytest.raises(ConfigurationError, match="id is not unique"):
        check_target(table.target)


def test_a_missing_table_a_view_and_a_missing_right_are_told_beforehand(
    table: Table, postgres_url: str
) -> None:
    check_target(table.target)
    with pytest.raises(ConfigurationError, match="no table answer"):
        check_target(replace(table.target, table="answer"))
    view = f"view_{secrets.token_hex(4)}"
    table.run(f"CREATE VIEW {view} AS SELECT * FROM {{}}")
    with pytest.raises(ConfigurationError, match=f"{view} is a view or the like.*name the table behind it"):
        check_target(replace(table.target, table=view))
    with pytest.raises(ConfigurationError, match="may not write"):
        check_target(as_another_role(table, postgres_url, "SELECT"))
    assert write(as_another_role(table, postgres_url, "SELECT, INSERT, UPDATE"), [row("1")]).num_written == 1


@pytest.mark.parametrize("unreadable", ["id", *FIELDS])
def test_a_column_that_the_login_may_not_read_is_told_beforehand(
    table: Table, postgres_url: str, unreadable: str
) -> None:
    readable = ", ".join({"id", *FIELDS} - {unreadable})
    target = as_another_role(table, postgres_url, f"INSERT, UPDATE, SELECT ({readable})")
    with psycopg.connect(target.url) as connection:
        with psycopg.connect(table.url) as owner:
            statement = upsert_statement(target, target_columns(owner, table.target))
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(statement, [[]] * (1 + len(FIELDS)))

    with pytest.raises(ConfigurationError, match="may not write") as caught:
        check_target(target)

    assert f".{unreadable}; grant it SELECT, INSERT and UPDATE." in str(caught.value)


def test_columns_that_are_not_written_need_no_rights(table: Table, postgres_url: str) -> None:
    names = ", ".join(("id", *FIELDS))
    target = as_another_role(table, postgres_url, f"SELECT ({names}), INSERT ({names}), UPDATE ({names})")
    check_target(target)
    assert [write(target, [row("1")]).num_written for _ in range(2)] == [1, 1]


def test_a_server_that_does_not_answer_and_a_wrong_password_are_told_without_it(
    table: Table, closed_port: int, postgres_url: str
) -> None:
    away = replace(table.target, url=f"postgresql://me:secret@127.0.0.1:{closed_port}/x")
    with pytest.raises(StorageUnavailableError) as caught:
        check_target(away)
    assert "secret" not in str(caught.value)
    parts = urlsplit(postgres_url)
    wrong = parts._replace(netloc=f"{parts.username}:secret@{parts.hostname}:{parts.port}").geturl()
    with pytest.raises(StorageError, match="user or password") as refused:
        check_target(replace(table.target, url=wrong))
    assert "secret" not in str(refused.value)
    assert "secret" not in repr(replace(table.target, url=wrong))


@pytest.mark.parametrize(
    ("sqlstate", "told"),
    [
        ("53100", "could not extend file"),
        ("53200", "out of memory"),
        ("53400", "temporary file size exceeds temp_file_limit"),
    ],
)
def test_a_server_that_ran_out_of_something_is_told_to_be_given_more(
    table: Table, sqlstate: str, told: str
) -> None:
    table.execute(
        f"CREATE OR REPLACE FUNCTION run_out() RETURNS trigger LANGUAGE plpgsql AS $$"
        f" BEGIN RAISE EXCEPTION '{told}: \"secret\"' USING ERRCODE = '{sqlstate}'; END $$"
    )
    table.run("CREATE TRIGGER full_server BEFORE INSERT ON {} EXECUTE FUNCTION run_out()")

    with pytest.raises(StorageUnavailableError) as caught:
        table.write(row("1"), row("2"))

    assert caught.value.retryable
    assert str(caught.value) == (
        f"The server of {table.target.table} has run out of something ({told}); write back again when it has "
        "more room, memory or connections."
    )
    assert table.rows() == []


def test_a_server_without_a_free_connection_is_told_to_be_given_more(table: Table, postgres_url: str) -> None:
    role = f"crowd_{secrets.token_hex(4)}"
    table.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x' CONNECTION LIMIT 0")
    parts = urlsplit(postgres_url)
    url = parts._replace(netloc=f"{role}:x@{parts.hostname}:{parts.port}").geturl()

    with pytest.raises(
        StorageUnavailableError, match=f"run out of something \\(too many connections.*{role}"
    ):
        check_target(replace(table.target, url=url))
