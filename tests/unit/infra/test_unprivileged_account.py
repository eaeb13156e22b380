import os
from pathlib import Path

import pytest

from infra.postgres import postgres_root
from infra.unprivileged import Account, can_enter, can_run, postgres_account

STRANGER = Account(uid=54_321, gid=54_321)


def test_a_closed_parent_bars_the_way(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir(mode=0o755)
    tmp_path.chmod(0o700)
    assert not can_enter(inner, STRANGER)


def test_the_root_folder_is_open() -> None:
    assert can_enter(Path("/"), STRANGER)


def test_a_plain_user_keeps_postgres_in_the_state_folder(tmp_path: Path) -> None:
    assert postgres_root(tmp_path, "0123456789ab", None) == tmp_path / "postgres"


def test_data_moves_where_the_account_cannot_reach_the_state_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert postgres_root(tmp_path, "0123456789ab", STRANGER) == Path("/var/lib/blendserve-0123456789ab")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs programs as another account")
def test_a_program_below_a_closed_folder_cannot_be_run(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    tmp_path.chmod(0o700)
    account = postgres_account()
    assert account is not None
    assert not can_run(program, account)
    assert can_run(Path("/bin/true"), account)
