"""What a stack says of itself without starting anything."""

import os
from pathlib import Path

import pytest

from blend_core.errors import ServiceError
from infra.state import ExternalServices
from infra.supervisor import LocalStack, ServiceState


def ignore(line: str) -> None:
    pass


def test_a_stack_never_started_is_stopped_and_makes_no_folder(tmp_path: Path) -> None:
    stack = LocalStack(tmp_path / "home")

    assert [status.name for status in stack.status()] == ["postgres", "s3", "prefect", "serve"]
    assert {status.state for status in stack.status()} == {ServiceState.STOPPED}
    assert stack.state() is None
    stack.down(ignore)
    assert not (tmp_path / "home").exists()


def test_external_services_are_named_and_need_no_folder(tmp_path: Path) -> None:
    external = ExternalServices(
        database_url="postgresql://owner:secret@db.example/blend",
        read_only_database_url="postgresql://reader:secret@db.example/blend",
        s3_endpoint_url="https://s3.example",
        s3_bucket="nightly",
        prefect_api_url="https://prefect.example/api",
    )
    stack = LocalStack(tmp_path / "home", external=external)

    state = stack.state()
    assert state is not None
    assert (state.s3_bucket, state.s3_access_key) == ("nightly", None)
    assert state.prefect_ui_url == "https://prefect.example"
    assert "secret" not in repr(state)
    assert [status.state for status in stack.status()] == [ServiceState.EXTERNAL] * 3 + [ServiceState.STOPPED]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ServiceError, match="BLEND_HOME"):
        LocalStack(tmp_path / "home").up(ignore, serve=False)


def test_a_home_below_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServiceError, match="BLEND_HOME"):
        LocalStack(tmp_path / "file" / "home").up(ignore, serve=False)


def test_a_broken_state_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text("{")
    with pytest.raises(ServiceError, match=r"stack\.json"):
        LocalStack(tmp_path).status()
