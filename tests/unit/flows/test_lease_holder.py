"""A process that holds a run is known to be gone only when that is sure."""

import json
import subprocess
import sys

import pytest

from flows.lease_holder import holder_details, is_gone

WRITE_DETAILS = (
    "import json; from flows.lease_holder import holder_details as details; "
    "print(json.dumps(details()), flush=True)"
)


@pytest.fixture(scope="module")
def dead() -> dict[str, str]:
    """The details that a process wrote which has ended."""
    done = subprocess.run(
        [sys.executable, "-c", WRITE_DETAILS], stdout=subprocess.PIPE, text=True, check=True
    )
    details: dict[str, str] = json.loads(done.stdout)
    return details


def test_a_process_that_ended_is_gone(dead: dict[str, str]) -> None:
    assert is_gone(dead)


def test_a_process_that_was_killed_and_that_nobody_reaped_is_gone() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", f"{WRITE_DETAILS}; import time; time.sleep(60)"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    details = json.loads(process.stdout.readline())
    assert not is_gone(details)

    process.kill()
    process.stdout.close()
    try:
        while not is_gone(details):
            pass
    finally:
        process.wait()


def test_this_process_is_not_gone() -> None:
    assert not is_gone(holder_details())


def test_a_process_that_got_the_id_of_another_is_not_taken_for_it() -> None:
    assert is_gone({**holder_details(), "holder_started_at_s": "1000.0"})


@pytest.mark.parametrize("change", [{"holder_machine": "elsewhere"}, {"holder_pid": "none"}])
def test_what_cannot_be_told_is_not_gone(dead: dict[str, str], change: dict[str, str]) -> None:
    assert not is_gone({**dead, **change})


def test_a_run_without_details_is_not_gone() -> None:
    assert not is_gone({})
