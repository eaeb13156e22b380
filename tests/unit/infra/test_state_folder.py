import errno
import os
import socket
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from blend_core.errors import ServiceError
from infra.folder import StateFolder
from infra.ports import free_ports, is_port_free
from infra.state import ExternalServices, StackConfig, stack_state


def folder_at(home: Path) -> StateFolder:
    folder = StateFolder(home)
    folder.create()
    return folder


def config_of(folder: StateFolder) -> StackConfig:
    return folder.load_or_create(lambda: folder.home / "postgres")


def test_values_are_made_once_and_remembered(tmp_path: Path) -> None:
    first = config_of(folder_at(tmp_path / "home"))

    def unexpected() -> Path:
        raise AssertionError("asked again")

    assert folder_at(tmp_path / "home").load_or_create(unexpected) == first


def lack_of_room(folder: StateFolder, error: Exception) -> str:
    with pytest.raises(ServiceError) as caught, folder.lack_of_room_told():
        raise error
    return str(caught.value)


def test_a_full_disk_is_told_with_its_folder_and_any_other_error_is_left_as_it_is(tmp_path: Path) -> None:
    home = tmp_path / "home"
    folder = folder_at(home)
    with pytest.raises(ServiceError, match="home is full; make room there"), folder.lack_of_room_told():
        Path("/dev/full").write_text("x")
    with pytest.raises(PermissionError), folder.lack_of_room_told():
        raise PermissionError("no")
    inside = OSError(errno.ENOSPC, "No space left on device", str(home / "logs" / "s3.log"))
    assert lack_of_room(folder, inside) == (
        f"The disk of {home}/logs is full; make room there, or name another state folder in BLEND_HOME, and "
        f"do this again. What failed: {inside}"
    )
    elsewhere = OSError(errno.ENOSPC, "No space left on device", "/elsewhere/pg_wal/1")
    assert lack_of_room(folder, elsewhere) == (
        f"The disk of /elsewhere/pg_wal is full; make room there and do this again. What failed: {elsewhere}"
    )


@pytest.mark.parametrize(
    ("full", "told"),
    [
        (None, "^It ended.$"),
        (
            "home",
            "home is full; make room there, or name another state folder in BLEND_HOME, and .* It ended",
        ),
        ("apart", "apart is full; make room there and do this again. What failed: It ended"),
    ],
)
def test_a_service_that_ends_for_lack_of_room_is_told_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str | None, told: str
) -> None:
    folder, apart = folder_at(tmp_path / "home"), tmp_path / "apart"
    apart.mkdir()
    folder.load_or_create(lambda: apart)

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=4096 if path.name == full else 1 << 40)

    monkeypatch.setattr("shutil.disk_usage", usage)
    with pytest.raises(ServiceError, match=told), folder.lack_of_room_told():
        raise ServiceError("It ended.")


def test_two_folders_share_no_password(tmp_path: Path) -> None:
    first, second = config_of(folder_at(tmp_path / "a")), config_of(folder_at(tmp_path / "b"))
    assert first.owner_password != second.owner_password
    assert first.s3_secret_key != second.s3_secret_key


def test_passwords_are_readable_by_the_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = folder_at(tmp_path / "home")
        config_of(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder.home / "stack.json").stat().st_mode) == 0o600
    assert not stat.S_IMODE(folder.home.stat().st_mode) & 0o066
    for part in ("processes", "logs", "s3", "prefect"):
        assert stat.S_IMODE((folder.home / part).stat().st_mode) == 0o700


def test_a_free_port_is_kept_and_a_taken_one_replaced(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "home")
    config = config_of(folder)
    assert folder.with_free_port(config, "s3_port") == config

    with socket.create_server(("127.0.0.1", config.s3_port)):
        moved = folder.with_free_port(config, "s3_port")

    assert moved.s3_port not in {config.postgres_port, config.s3_port, config.prefect_port}
    assert (moved.postgres_port, moved.owner_password) == (config.postgres_port, config.owner_password)
    assert folder.load() == moved


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(is_port_free(port) for port in ports)


def test_the_lock_is_held_by_one_and_waited_for(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "home")
    order: list[str] = []
    waits = threading.Event()

    def second() -> None:
        with folder.lock(waits.set):
            order.append("second")

    with folder.lock(lambda: None):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_a_lock_that_is_never_released_is_named(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "home")
    with (
        folder.lock(lambda: None),
        pytest.raises(ServiceError, match="end it and try again"),
        folder.lock(lambda: None, timeout_s=0.2),
    ):
        pass


def test_a_file_that_lacks_an_entry_is_named(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "home")
    (folder.home / "stack.json").write_text('{"postgres_port": 1}')
    with pytest.raises(ServiceError, match="s3_port"):
        folder.load()


def test_an_external_service_takes_the_place_of_the_embedded_one(tmp_path: Path) -> None:
    config = config_of(folder_at(tmp_path / "home"))
    state = stack_state(config, ExternalServices(database_url="postgresql://owner@db.example/blend"))

    assert state is not None
    assert state.database_url == "postgresql://owner@db.example/blend"
    assert state.read_only_database_url is None
    assert state.s3_endpoint_url == config.s3_endpoint_url
    assert state.s3_secret_key == config.s3_secret_key
    assert state.prefect_ui_url == f"http://127.0.0.1:{config.prefect_port}"


def test_without_a_folder_a_stack_is_known_only_if_every_service_is_external() -> None:
    external = ExternalServices(
        database_url="postgresql://db.example/blend", s3_endpoint_url="https://s3.example"
    )
    assert stack_state(None, external) is None
