"""The embedded Postgres of a stack: accounts, data, kills, places."""

import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest

from infra.folder import StateFolder
from infra.postgres import PostgresService
from infra.state import StackState
from infra.supervisor import LocalStack, ServiceState

pytestmark = pytest.mark.postgres

UP_PROGRAM = """
import sys
from pathlib import Path
from infra.state import ExternalServices
from infra.supervisor import LocalStack
elsewhere = "http://127.0.0.1:9"
external = ExternalServices(s3_endpoint_url=elsewhere, prefect_api_url=elsewhere + "/api")
stack = LocalStack(Path(sys.argv[1]), external=external, durable=False)
stack.up(lambda line: None, serve=False)
print(stack.status()[0].pid)
"""


def ignore(line: str) -> None:
    pass


def up(stack: LocalStack) -> StackState:
    return stack.up(ignore, serve=False)


def pid_of(stack: LocalStack, name: str) -> int:
    pid = next(status.pid for status in stack.status() if status.name == name)
    assert pid is not None
    return pid


def write_row(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (value text)")
        connection.execute("INSERT INTO kept VALUES ('still here')")


def read_rows(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute("SELECT value FROM kept")]


def test_owner_makes_tables_and_reader_only_logs_in(postgres_stack: LocalStack) -> None:
    state = up(postgres_stack)
    write_row(state.database_url)

    assert state.read_only_database_url is not None
    with psycopg.connect(state.read_only_database_url) as connection:
        assert connection.execute("SELECT current_user").fetchone() == ("blend_reader",)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("CREATE TABLE intruder (value text)")


def test_owner_is_no_superuser(postgres_stack: LocalStack) -> None:
    with psycopg.connect(up(postgres_stack).database_url) as connection:
        found = connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone()
    assert found == (False,)


def test_owner_lets_the_reader_read(postgres_stack: LocalStack) -> None:
    state = up(postgres_stack)
    write_row(state.database_url)
    with psycopg.connect(state.database_url) as connection:
        connection.execute("CREATE ROLE readers NOLOGIN")
        connection.execute("GRANT SELECT ON kept TO readers")
        connection.execute("GRANT readers TO blend_reader")
        connection.execute("ALTER ROLE blend_reader SET default_transaction_read_only = on")

    assert state.read_only_database_url is not None
    assert read_rows(state.read_only_database_url) == ["still here"]


def test_wrong_password_is_refused(postgres_stack: LocalStack) -> None:
    parts = urlsplit(up(postgres_stack).database_url)
    wrong = parts._replace(netloc=f"blend:guess@{parts.hostname}:{parts.port}").geturl()
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(wrong)


def test_up_again_starts_nothing(postgres_stack: LocalStack) -> None:
    first_state = up(postgres_stack)
    first_pid = pid_of(postgres_stack, "postgres")
    lines: list[str] = []

    assert postgres_stack.up(lines.append, serve=False) == first_state
    assert pid_of(postgres_stack, "postgres") == first_pid
    assert lines == []


def test_rows_survive_down_and_up(postgres_stack: LocalStack) -> None:
    state = up(postgres_stack)
    write_row(state.database_url)

    postgres_stack.down(ignore)

    assert postgres_stack.status()[0].state is ServiceState.STOPPED
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(state.database_url)
    assert up(postgres_stack) == state
    assert read_rows(state.database_url) == ["still here"]


def test_rows_survive_a_kill_of_the_server(
    postgres_stack: LocalStack, kill_service: Callable[[LocalStack, str], None]
) -> None:
    state = up(postgres_stack)
    write_row(state.database_url)

    kill_service(postgres_stack, "postgres")

    assert up(postgres_stack) == state
    assert read_rows(state.database_url) == ["still here"]


def test_a_killed_server_leaves_no_process_behind(postgres_stack: LocalStack) -> None:
    up(postgres_stack)
    server = psutil.Process(pid_of(postgres_stack, "postgres"))
    children = server.children(recursive=True)
    assert children
    for child in children:
        with suppress(psutil.NoSuchProcess):  # some live for a moment only
            child.suspend()  # so that it cannot notice the end of its parent by itself
    server.kill()

    postgres_stack.down(ignore)

    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_pid_file_of_a_killed_server_is_no_obstacle_when_its_pid_is_taken(
    postgres_stack: LocalStack, kill_service: Callable[[LocalStack, str], None]
) -> None:
    state = up(postgres_stack)
    write_row(state.database_url)
    data_folder = Path(psutil.Process(pid_of(postgres_stack, "postgres")).cmdline()[2])
    kill_service(postgres_stack, "postgres")
    lines = (data_folder / "postmaster.pid").read_text().split("\n")
    (data_folder / "postmaster.pid").write_text("\n".join([str(os.getpid()), *lines[1:]]))

    up(postgres_stack)

    assert read_rows(state.database_url) == ["still here"]


def test_a_port_taken_while_the_service_was_down_is_replaced(postgres_stack: LocalStack) -> None:
    state = up(postgres_stack)
    write_row(state.database_url)
    postgres_stack.down(ignore)
    port = urlsplit(state.database_url).port
    assert port is not None

    with socket.create_server(("127.0.0.1", port)):
        moved = up(postgres_stack)

    assert urlsplit(moved.database_url).port != port
    assert read_rows(moved.database_url) == ["still here"]
    assert postgres_stack.state() == moved


def test_two_commands_at_once_bring_up_one_server(postgres_stack: LocalStack) -> None:
    commands = [
        subprocess.Popen(
            [sys.executable, "-c", UP_PROGRAM, str(postgres_stack.home)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = [command.communicate(timeout=60)[0].strip() for command in commands]

    assert [command.returncode for command in commands] == [0, 0, 0]
    assert len(set(outputs)) == 1
    # It outlives the commands that started it.
    assert pid_of(postgres_stack, "postgres") == int(outputs[0])


def test_passwords_lie_in_a_file_of_the_owner_and_in_no_argument(postgres_stack: LocalStack) -> None:
    state = up(postgres_stack)
    password = urlsplit(state.database_url).password
    assert password is not None

    assert stat.S_IMODE((postgres_stack.home / "stack.json").stat().st_mode) == 0o600
    assert password not in " ".join(psutil.Process(pid_of(postgres_stack, "postgres")).cmdline())
    assert password not in repr(state)


@pytest.mark.skipif(os.geteuid() != 0, reason="root only: a plain user runs Postgres as himself")
def test_root_keeps_the_data_where_nobody_can_reach_it(postgres_stack: LocalStack) -> None:
    postgres_stack.home.parent.chmod(0o700)
    up(postgres_stack)
    server = psutil.Process(pid_of(postgres_stack, "postgres"))

    assert server.username() == "nobody"
    data_folder = Path(server.cwd())
    assert data_folder.parent.parent == Path("/var/lib")

    postgres_stack.erase(ignore)
    assert not data_folder.parent.exists()


@pytest.mark.parametrize("delay_s", [0.4, 0.8, 1.2])
def test_a_first_start_that_was_killed_is_made_good(postgres_stack: LocalStack, delay_s: float) -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", UP_PROGRAM, str(postgres_stack.home)], stdout=subprocess.DEVNULL
    )
    time.sleep(delay_s)
    command.kill()
    command.wait()

    state = up(postgres_stack)

    write_row(state.database_url)
    assert read_rows(state.database_url) == ["still here"]


def test_a_database_that_the_server_still_makes_for_another_start_is_taken(
    postgres_stack: LocalStack,
) -> None:
    state = up(postgres_stack)
    config = StateFolder(postgres_stack.home).load()
    assert config is not None
    with psycopg.connect(config.superuser_database_url, autocommit=True) as superuser:
        superuser.execute("DROP DATABASE blend")
    service = PostgresService(postgres_stack.home, config, None)
    begin = Barrier(4)

    def prepare() -> None:
        begin.wait()
        service.prepare()

    with ThreadPoolExecutor(4) as starts:
        for started in [starts.submit(prepare) for _ in range(4)]:
            started.result()
    write_row(state.database_url)
