"""The account that Postgres runs under when root starts it, since Postgres refuses to run as root."""

import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Account:
    """A user and the group it runs in."""

    uid: int
    gid: int


def postgres_account() -> Account | None:
    """`nobody` for root; None for a plain user, who runs Postgres as himself."""
    if os.geteuid() != 0:
        return None
    entry = pwd.getpwnam("nobody")
    return Account(entry.pw_uid, entry.pw_gid)


def can_enter(path: Path, account: Account) -> bool:
    """Whether the account may pass through every folder from the root down to `path`, which exists."""
    resolved = path.resolve()
    for folder in (resolved, *resolved.parents):
        status = folder.stat()
        if status.st_uid == account.uid:
            bit = 0o100
        elif status.st_gid == account.gid:
            bit = 0o010
        else:
            bit = 0o001
        if not status.st_mode & bit:
            return False
    return True


def can_run(program: Path, account: Account) -> bool:
    """Whether the account can run `program --version` where it lies."""
    try:
        result = subprocess.run(  # noqa: S603 - a program of ours, no shell
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            cwd="/",
            user=account.uid,
            group=account.gid,
            extra_groups=[],
            timeout=30,
        )
    except OSError:
        return False
    return result.returncode == 0
