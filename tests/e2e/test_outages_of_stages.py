"""A run outlasts services that are away while it is in a stage."""

from typing import Any

import pytest

from blend_core.errors import StorageUnavailableError
from flows import outage, running
from flows.progress import SilentProgress
from flows.running import create_job, run_stages
from flows.stages import JobContext
from flows.stopping import StopSignal
from flows.wiring import Wiring
from storage.jobs import get_job

pytestmark = [pytest.mark.postgres, pytest.mark.s3]


class Notes(SilentProgress):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, message: str) -> None:
        self.told.append(message)


class Away:
    """Calls stages; a service is away at the first call of some, or at each of them."""

    def __init__(self, *stages: str, always: bool = False) -> None:
        self.calls: list[str] = []
        self._away = set(stages)
        self._always = always

    def __call__(self, name: str, stage: Any, context: JobContext) -> str:
        is_first = name not in self.calls
        self.calls.append(name)
        if name in self._away and (is_first or self._always):
            raise StorageUnavailableError(f"Away in {name}.")
        return str(stage(context))


@pytest.fixture
def job_id(wiring: Wiring, make_job: Any) -> str:
    """A job that no engine is needed for."""
    return create_job(wiring, make_job(bad_lines=(b"{",)))


def test_a_stage_is_done_again_when_a_service_is_back(wiring: Wiring, job_id: str) -> None:
    notes, away = Notes(), Away("export")

    outcome = run_stages(wiring, job_id, notes, StopSignal(), away)

    assert (outcome.status, outcome.errored) == ("completed", 1)
    assert away.calls == ["ingest", "export", "export", "report"]
    assert notes.told == ["Away in export. It is tried again, for 10 minutes."]


@pytest.mark.parametrize("name", ["get_job", "take_job", "job_outcome"])
def test_what_a_run_asks_before_and_after_its_stages_is_asked_again(
    wiring: Wiring, job_id: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ask = getattr(running, name)
    left = [StorageUnavailableError("Away.")]

    def asked(*arguments: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return ask(*arguments, **named)

    monkeypatch.setattr(running, name, asked)

    assert run_stages(wiring, job_id, SilentProgress(), StopSignal(), Away()).status == "completed"
    assert left == []


def test_a_stage_that_is_reached_ends_the_outage_before_it(
    wiring: Wiring, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Less than the pause between two tries: a second failure of one outage is its last.
    monkeypatch.setattr(outage, "GIVE_UP_AFTER_S", 0.1)
    notes, away = Notes(), Away("ingest", "export", "report")

    assert run_stages(wiring, job_id, notes, StopSignal(), away).status == "completed"
    assert len(notes.told) == 3


def test_a_stage_that_is_never_done_is_given_up(
    wiring: Wiring, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "GIVE_UP_AFTER_S", 0.1)
    away = Away("export", always=True)

    with pytest.raises(StorageUnavailableError, match="Away in export"):
        run_stages(wiring, job_id, SilentProgress(), StopSignal(), away)

    assert away.calls == ["ingest", "export", "export"]
    assert get_job(wiring.database, job_id).status == "finalizing"
