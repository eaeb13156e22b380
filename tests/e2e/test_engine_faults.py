"""A request that kills, hangs or breaks the engine is found and set aside; no other request pays for it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blend_core.errors import EngineDiedError
from flows.progress import SilentProgress
from flows.report import build_report
from flows.running import create_job, run_job
from flows.settings import Settings
from flows.wiring import Endpoints, Wiring
from storage.job_status import JobStatus
from storage.jobs import get_job
from storage.results import ResultRow, counts, iter_results
from storage.suspects import engine_deaths, pending_suspects
from tests.e2e.conftest import ENGINE
from tests.e2e.faulty_engine import HANGS, KILLS, RAISES, make_faulty_engine

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]

MakeWiring = Callable[..., Wiring]


@pytest.fixture(autouse=True)
def faulty_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine processes make the faulty engine; `tests` is on the path that they inherit."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setattr("flows.wiring.make_torch_engine", make_faulty_engine)


@pytest.fixture
def with_engine(endpoints: Endpoints, tmp_path: Path) -> Iterator[MakeWiring]:
    """The parts of a process with other settings of its engine."""

    made: list[Wiring] = []

    def make(**changes: Any) -> Wiring:
        settings = Settings(home=tmp_path / "home", engine=ENGINE.model_copy(update=changes))
        wiring = Wiring.from_settings(settings, endpoints)
        made.append(wiring)
        wiring.database.upgrade()
        wiring.objects.ensure_bucket()
        return wiring

    yield make
    for wiring in made:
        wiring.close()


def submit(wiring: Wiring, make_job: Any, name: str, bodies: list[dict[str, Any]], **options: Any) -> str:
    """A job of one request per body; ids `request-0`, …"""
    lines = [
        json.dumps(
            {
                "custom_id": f"request-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "messages": [{"role": "user", "content": f"Question {number}: what is so?"}],
                    "max_tokens": 24,
                    "temperature": 0,
                    **body,
                },
            }
        )
        for number, body in enumerate(bodies)
    ]
    entry = wiring.objects.put(f"tests/{name}/faults.jsonl", "\n".join(lines).encode())
    return create_job(wiring, make_job(s3=[entry.uri], options={"policy": "fcfs", **options}))


def errors(wiring: Wiring, job_id: str) -> dict[str | None, ResultRow]:
    return {row.custom_id: row for row in iter_results(wiring.database, job_id) if row.status != "succeeded"}


def test_a_request_that_kills_engines_is_set_aside_and_a_new_process_remembers_the_suspects(
    with_engine: MakeWiring, make_job: Any, tmp_path: Path
) -> None:
    wiring = with_engine(max_num_seqs=4, max_restarts=1)
    bodies = [{"seed": KILLS} if number == 6 else {} for number in range(14)]
    job_id = submit(wiring, make_job, tmp_path.name, bodies)

    # The first process gives up at the second death in a row, the next one knows whom to suspect.
    with pytest.raises(EngineDiedError, match="2 times in a row"):
        run_job(wiring, job_id, SilentProgress())
    assert get_job(wiring.database, job_id).status is JobStatus.IN_PROGRESS
    suspects = pending_suspects(wiring.database, job_id)
    assert 6 in {suspect.seq for suspect in suspects}
    assert len(suspects) < 5
    outcome = run_job(with_engine(max_num_seqs=4), job_id, SilentProgress())

    assert (outcome.status, outcome.succeeded, outcome.errored) == ("completed", 13, 1)
    row = errors(wiring, job_id)["request-6"]
    assert row.error_code == "engine_died"
    assert "2 times while it ran this request alone" in (row.error_message or "")
    deaths = engine_deaths(wiring.database, job_id)
    assert [death.num_in_flight for death in deaths[-2:]] == [1, 1]
    assert len(deaths) <= 5
    assert all("SIGKILL" in death.reason for death in deaths)
    report = build_report(wiring.database, job_id)
    assert report.engine_deaths == tuple(deaths)


@pytest.mark.parametrize(
    ("seed", "reason"), [(HANGS, "told nothing"), (RAISES, "RuntimeError")], ids=["hangs", "raises"]
)
def test_a_request_that_hangs_or_breaks_the_engine_is_set_aside(
    with_engine: MakeWiring, make_job: Any, tmp_path: Path, seed: int, reason: str
) -> None:
    wiring = with_engine(max_num_seqs=2, stall_limit_s=6.0)
    job_id = submit(wiring, make_job, tmp_path.name, [{}, {"seed": seed}, {}])

    outcome = run_job(wiring, job_id, SilentProgress())

    assert (outcome.status, outcome.succeeded, outcome.errored) == ("completed", 2, 1)
    assert list(errors(wiring, job_id)) == ["request-1"]
    deaths = engine_deaths(wiring.database, job_id)
    assert not any(death.reason.startswith("Rank") for death in deaths)
    assert all(reason in death.reason and "secret" not in death.reason for death in deaths)


def test_requests_too_large_for_the_cache_are_refused_when_they_are_planned(
    with_engine: MakeWiring, make_job: Any, tmp_path: Path
) -> None:
    wiring = with_engine(kv_gib=0.0002)
    long_prompt = [{"role": "user", "content": "word " * 400}]
    bodies: list[dict[str, Any]] = [{}, {"max_tokens": 2000}, {"messages": long_prompt, "max_tokens": 1}]
    job_id = submit(wiring, make_job, tmp_path.name, bodies)
    seen: list[int] = []

    class LookingAfterThePlan(SilentProgress):
        def stage_finished(self, stage: str, detail: str) -> None:
            if stage == "plan":
                seen.append(counts(wiring.database, job_id).errored)

    outcome = run_job(wiring, job_id, LookingAfterThePlan())

    assert (outcome.status, outcome.succeeded, outcome.errored) == ("completed", 1, 2)
    assert seen == [2]
    found = errors(wiring, job_id)
    assert {row.error_code for row in found.values()} == {"request_too_large"}
    assert "max_tokens of 2,000" in (found["request-1"].error_message or "")


def test_a_request_that_takes_too_long_is_an_error_row(
    with_engine: MakeWiring, make_job: Any, tmp_path: Path
) -> None:
    wiring = with_engine()
    too_long = {"max_tokens": 3000, "ignore_eos": True}
    bodies: list[dict[str, Any]] = [{"max_tokens": 1}, too_long, {"max_tokens": 1}]
    job_id = submit(wiring, make_job, tmp_path.name, bodies, request_timeout_s=1.5)

    outcome = run_job(wiring, job_id, SilentProgress())

    assert (outcome.status, outcome.succeeded, outcome.errored) == ("completed", 2, 1)
    row = errors(wiring, job_id)["request-1"]
    assert (row.error_code, row.output_text) == ("timed_out", None)
    assert "1.5 s" in (row.error_message or "")
