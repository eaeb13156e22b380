"""A table that cannot be written is told on the job, and fails nothing else."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pydantic import SecretStr

from blend_core.errors import ConfigurationError, RequestErrorCode, StaleRunError, StorageUnavailableError
from flows.job_spec import BatchJobSpec
from flows.preflight import check_table_to_write
from flows.running import create_job
from flows.settings import Settings
from flows.stopping import StopReason, StopSignal
from flows.wiring import Endpoints, Wiring
from flows.write_back import check_write_back, write_back_results
from storage.database import Database
from storage.jobs import get_job
from storage.lost_runs import mark_lost
from storage.ownership import Run
from storage.requests import RequestRow, RequestWriter
from storage.runs import start_run

pytestmark = pytest.mark.postgres


@pytest.fixture
def make_wiring(db: Database, tmp_path: Path) -> Iterator[Callable[[str], Wiring]]:
    with ExitStack() as stack:

        def make(target_url: str) -> Wiring:
            settings = Settings(home=tmp_path, targets={"shop": SecretStr(target_url)})
            wiring = Wiring.from_settings(settings, Endpoints(db.url))
            stack.callback(wiring.close)
            return wiring

        yield make


@pytest.fixture
def table(db: Database) -> str:
    """A table of the user's that takes every result."""
    name = f"answer_{secrets.token_hex(4)}"
    with db.raw() as connection:
        connection.execute(
            f"CREATE TABLE {name} (id text PRIMARY KEY, text text, status text, error text, model text,"
            " job_id text, finished_at timestamptz)"
        )
    return name


def spec(connection: str = "shop", table: str = "nowhere") -> BatchJobSpec:
    write_back = {"connection": connection, "table": table, "key_column": "id"}
    return BatchJobSpec.model_validate({"name": "n", "s3": ["s3://b/k"], "write_back": write_back})


def test_a_server_that_is_away_is_a_note_on_the_job_and_before_the_night(
    make_wiring: Callable[[str], Wiring], closed_port: int
) -> None:
    wiring = make_wiring(f"postgresql://me:secret@127.0.0.1:{closed_port}/x")
    notes: list[str] = []
    check_table_to_write(wiring, spec(), notes.append)
    assert "did not answer" in notes[0]

    job_id = create_job(wiring, spec())
    outcome = write_back_results(wiring, spec(), job_id)

    assert outcome["num_written"] == 0
    assert "did not answer" in outcome["error"]
    assert "secret" not in outcome["error"]
    assert get_job(wiring.database, job_id).write_back == outcome


def test_results_that_cannot_be_read_are_no_fault_of_the_table(
    db: Database, closed_port: int, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path, targets={"shop": SecretStr(db.url)})
    wiring = Wiring.from_settings(settings, Endpoints(f"postgresql://me@127.0.0.1:{closed_port}/x"))
    with pytest.raises(StorageUnavailableError):
        write_back_results(wiring, spec(), "job_x")
    wiring.close()


def test_a_missing_table_and_an_unknown_connection_are_wrong_before_the_night(
    make_wiring: Callable[[str], Wiring], db: Database
) -> None:
    wiring = make_wiring(db.url)
    with pytest.raises(ConfigurationError, match="no table nowhere"):
        check_table_to_write(wiring, spec(), lambda note: None)
    with pytest.raises(ConfigurationError, match="BLEND_TARGETS__STORE"):
        check_write_back(wiring, spec("store"))
    job_id = create_job(wiring, spec())
    assert "no table nowhere" in write_back_results(wiring, spec(), job_id)["error"]


def test_a_run_that_was_taken_over_writes_nothing_into_the_table(
    make_wiring: Callable[[str], Wiring], db: Database, table: str
) -> None:
    wiring = make_wiring(db.url)
    job_id = create_read_job(wiring, table, ["a"])

    def take() -> Run:
        return start_run(db, job_id, engine="none", policy="fcfs", details={}, lease_s=60)

    first = take()
    mark_lost(db, first.run_id)
    second = take()

    with pytest.raises(StaleRunError):
        write_back_results(wiring, spec(table=table), job_id, first)

    assert rows_in(db, table) == []
    assert get_job(db, job_id).write_back is None
    assert write_back_results(wiring, spec(table=table), job_id, second)["num_written"] == 1
    assert rows_in(db, table) == ["a"]


def test_a_writing_that_breaks_off_tells_what_it_had_written(
    make_wiring: Callable[[str], Wiring], db: Database, table: str
) -> None:
    wiring = make_wiring(db.url)
    ids = [f"id-{number:03}" for number in range(600)]
    job_id = create_read_job(wiring, table, ids)
    with db.raw() as connection:
        connection.execute(
            f"CREATE FUNCTION {table}_full() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " IF NEW.id = 'id-550' THEN RAISE EXCEPTION 'disk full' USING ERRCODE = '53100'; END IF;"
            " RETURN NEW; END $$"
        )
        connection.execute(
            f"CREATE TRIGGER f BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION {table}_full()"
        )

    outcome = write_back_results(wiring, spec(table=table), job_id)

    assert outcome["num_written"] == 500
    assert "disk full" in outcome["error"]
    assert rows_in(db, table) == ids[:500]


@pytest.mark.parametrize(
    ("reason", "num_tries"),
    [(StopReason.INTERRUPTED, 1), (StopReason.CANCELLED, 1), (StopReason.EXPIRED, 3), (None, 3)],
)
def test_a_run_that_is_told_to_end_does_not_wait_for_a_locked_table(
    make_wiring: Callable[[str], Wiring],
    db: Database,
    table: str,
    monkeypatch: pytest.MonkeyPatch,
    reason: StopReason | None,
    num_tries: int,
) -> None:
    checks: list[Run] = []
    monkeypatch.setattr("storage.write_back._LOCK_TIMEOUT_MS", 50)
    monkeypatch.setattr("storage.write_back._MAX_LOCK_WAITS", 3)
    monkeypatch.setattr("flows.write_back.hold_job", lambda connection, run: checks.append(run))
    wiring, stop = make_wiring(db.url), StopSignal()
    job_id = create_read_job(wiring, table, ["a"])
    run = start_run(db, job_id, engine="none", policy="fcfs", details={}, lease_s=60)
    if reason is not None:
        stop.request(reason)

    with db.raw() as other:
        other.execute(f"LOCK {table} IN EXCLUSIVE MODE")
        outcome = write_back_results(wiring, spec(table=table), job_id, run, stop)

    assert checks == [run] * num_tries
    assert outcome["error"] == f"{table} is locked by another transaction; end that one and write back again."


def create_read_job(wiring: Wiring, table: str, custom_ids: list[str]) -> str:
    """A job whose requests all have a result, an error."""
    job_id = create_job(wiring, spec(table=table))
    with RequestWriter(wiring.database, job_id) as writer:
        for seq, custom_id in enumerate(custom_ids):
            row = RequestRow(seq, "s3://b/k", seq + 1, custom_id=custom_id)
            writer.add_error(row, RequestErrorCode.INVALID_JSON, "The line is no JSON; correct it.")
    return job_id


def rows_in(db: Database, table: str) -> list[str]:
    with db.raw() as connection:
        return [row[0] for row in connection.execute(f"SELECT id FROM {table} ORDER BY id")]
