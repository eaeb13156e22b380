import secrets
import subprocess
import sys
from importlib import resources
from urllib.parse import urlsplit

import alembic.command
import alembic.config
import psycopg
import pytest
import sqlalchemy as sa
from psycopg import sql
from sqlalchemy.dialects import postgresql

from blend_core.errors import StorageError
from storage.database import Database, ensure_read_only_login
from storage.job_sources import JobSource, load_job_sources
from storage.jobs import create_job
from storage.schema import metadata

pytestmark = pytest.mark.postgres


UPGRADE = "import sys; from storage.database import Database; print(Database(sys.argv[1]).upgrade())"


def test_four_processes_upgrade_at_once(empty_database_url: str) -> None:
    database = Database(empty_database_url)
    assert database.current_revision() is None
    command = [sys.executable, "-c", UPGRADE, empty_database_url]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    revisions = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert revisions == [database.current_revision()] * 4
    database.dispose()


def test_tables_without_an_upgrade_say_what_to_run(empty_database_url: str) -> None:
    database = Database(empty_database_url)
    with pytest.raises(StorageError, match="blend db upgrade"):
        create_job(database, name="n", model="m", spec={})
    database.dispose()


def test_what_a_job_read_before_there_was_a_table_for_it_is_kept(empty_database_url: str) -> None:
    database = Database(empty_database_url)
    config = alembic.config.Config()
    config.set_main_option("script_location", str(resources.files("migrations")))
    config.set_main_option("path_separator", "os")
    manifest = (
        '[{"uri": "s3://in/a.jsonl", "num_items": 34, "size_bytes": 700, "etag": "e"},'
        ' {"uri": "sql:1", "num_items": 20}]'
    )
    with database.connect() as connection:
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "0002")
        connection.execute(
            sa.text(
                "INSERT INTO batch_job (job_id, name, model, spec, manifest, ingested_at)"
                " VALUES ('job_old', 'n', 'm', '{}', :manifest, now()),"
                " ('job_unread', 'n', 'm', '{}', '[]', NULL)"
            ),
            {"manifest": manifest},
        )
    database.upgrade()
    assert load_job_sources(database, "job_old") == [
        JobSource("s3", "s3://in/a.jsonl", 700, "e", 34),
        JobSource("sql:1", "sql:1", num_items=20),
    ]
    assert load_job_sources(database, "job_unread") == []
    database.dispose()


def test_the_statements_know_the_columns_that_the_migrations_made(db: Database) -> None:
    migrated = sa.MetaData()
    with db.connect() as connection:
        migrated.reflect(connection, only=list(metadata.tables))
    dialect = postgresql.dialect()
    for name, table in metadata.tables.items():
        found = {column.name: column for column in migrated.tables[name].columns}
        assert list(found) == [column.name for column in table.columns]
        for column in table.columns:
            twin = found[column.name]
            assert twin.nullable == column.nullable, f"{name}.{column.name}"
            assert twin.primary_key == column.primary_key, f"{name}.{column.name}"
            assert twin.type.compile(dialect) == column.type.compile(dialect), f"{name}.{column.name}"


def test_every_table_view_and_column_has_a_comment(db: Database) -> None:
    query = """
        SELECT c.relname, a.attname FROM pg_class c
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum >= 0 AND NOT a.attisdropped
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p', 'v')
        AND NOT c.relispartition AND c.relname <> 'alembic_version'
        AND col_description(c.oid, a.attnum) IS NULL
        UNION ALL
        SELECT c.relname, NULL FROM pg_class c
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p', 'v')
        AND NOT c.relispartition AND c.relname <> 'alembic_version' AND obj_description(c.oid) IS NULL"""
    with db.connect() as connection:
        assert connection.execute(sa.text(query)).fetchall() == []


def test_the_reading_login_reads_everything_and_writes_nothing(db: Database) -> None:
    create_job(db, name="seen", model="m", spec={})
    ensure_read_only_login(db, "first")
    reader = Database(ensure_read_only_login(db, "p%w@/:"))
    with reader.connect() as connection:
        names = connection.execute(sa.text("SELECT name FROM job_progress")).scalars().all()
        assert "seen" in names
        for table in metadata.tables:
            connection.execute(sa.text(f"SELECT count(*) FROM {table}"))
        for view in ("run_summary", "batch_density", "request_result"):
            connection.execute(sa.text(f"SELECT count(*) FROM {view}"))
    for statement in ("DELETE FROM batch_job", "SET TRANSACTION READ WRITE; DELETE FROM batch_job"):
        with pytest.raises(StorageError, match="may not do this"), reader.raw() as raw:
            raw.execute(statement)
    reader.dispose()


def test_an_owner_who_may_not_make_roles_gives_an_existing_login_its_rights(
    postgres_server_url: str, empty_database_url: str
) -> None:
    name = f"owner_{secrets.token_hex(4)}"
    database_name = urlsplit(empty_database_url).path.removeprefix("/")
    with psycopg.connect(postgres_server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x'").format(sql.Identifier(name)))
        connection.execute(
            sql.SQL("ALTER DATABASE {} OWNER TO {}").format(
                sql.Identifier(database_name), sql.Identifier(name)
            )
        )
        known = connection.execute("SELECT FROM pg_roles WHERE rolname = 'blend_reader'").fetchone()
        verb = sql.SQL("CREATE" if known is None else "ALTER")
        connection.execute(sql.SQL("{} ROLE blend_reader LOGIN PASSWORD 'given'").format(verb))
    parts = urlsplit(empty_database_url)
    owner = Database(parts._replace(netloc=f"{name}:x@{parts.hostname}:{parts.port}").geturl())
    owner.upgrade()
    reader = Database(ensure_read_only_login(owner, "given"))
    with reader.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM request_result")).scalar_one() == 0
    owner.dispose()
    reader.dispose()


def test_wrong_password_and_missing_database_are_named_without_the_password(postgres_server_url: str) -> None:
    parts = urlsplit(postgres_server_url)
    wrong = parts._replace(netloc=f"{parts.username}:wrong-secret@{parts.hostname}:{parts.port}").geturl()
    for url, reason in (
        (wrong, "refused the user or password"),
        (parts._replace(path="/nowhere").geturl(), "does not exist"),
    ):
        database = Database(url)
        with pytest.raises(StorageError, match=reason) as caught:
            database.current_revision()
        assert "wrong-secret" not in str(caught.value)
        assert (parts.password or "") not in str(caught.value)
        database.dispose()
