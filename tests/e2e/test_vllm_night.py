"""A job on the real vLLM, from its sources to its rows, with a request among them that kills engines."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from blend_core.engines.vllm.installed import installed_vllm, why_not_vllm
from flows.job_spec import BatchJobSpec
from flows.progress import SilentProgress
from flows.running import create_job, run_job
from flows.settings import Settings
from flows.wiring import Endpoints, Wiring
from storage.results import iter_results
from storage.schema import batch_metric
from storage.suspects import engine_deaths
from tests.e2e.conftest import ENGINE
from tests.e2e.faulty_engine import KILLS, make_faulty_vllm_engine

WHY_NOT = why_not_vllm("cpu", installed_vllm())
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.postgres,
    pytest.mark.s3,
    pytest.mark.slow,
    pytest.mark.skipif(WHY_NOT is not None and os.environ.get("CI") != "true", reason=str(WHY_NOT)),
]


@pytest.fixture
def vllm_wiring(endpoints: Endpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wiring]:
    """The parts of a process whose engine is vLLM, with its fault."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setattr("flows.wiring.make_vllm_engine", make_faulty_vllm_engine)
    engine = ENGINE.model_copy(update={"name": "vllm", "max_num_seqs": 1, "vllm": {"separate_core": False}})
    wiring = Wiring.from_settings(Settings(home=tmp_path / "home", engine=engine), endpoints)
    wiring.database.upgrade()
    wiring.objects.ensure_bucket()
    yield wiring
    wiring.close()


def line(number: int, **body: Any) -> str:
    messages = [{"role": "user", "content": f"Question {number}: what is so?"}]
    return json.dumps(
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": messages, "max_tokens": 8, "temperature": 0, **body},
        }
    )


def test_a_night_on_vllm_sets_poison_aside_and_answers_the_rest(vllm_wiring: Wiring, tiny_model: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    lines = [
        line(0),
        line(1, response_format=schema, max_tokens=20),
        line(2, seed=KILLS),
        line(3, lora_adapter="no-such"),
        line(4, response_format={"type": "json_schema", "json_schema": {"schema": {"type": "no-type"}}}),
    ]
    entry = vllm_wiring.objects.put("tests/vllm/in.jsonl", "\n".join(lines).encode())
    job = {"name": "test", "model": tiny_model, "s3": [entry.uri], "options": {"policy": "density_matched"}}

    job_id = create_job(vllm_wiring, BatchJobSpec.model_validate(job))

    outcome = run_job(vllm_wiring, job_id, SilentProgress())

    assert (outcome.status, outcome.succeeded, outcome.errored) == ("completed", 2, 3)
    rows = {row.custom_id: row for row in iter_results(vllm_wiring.database, job_id)}
    assert rows["request-1"].output_text in ('"yes"', '"no"')
    assert rows["request-2"].error_code == "engine_died"
    assert rows["request-3"].error_code == "unknown_lora_adapter"
    assert rows["request-4"].error_code == "invalid_schema"
    assert len(engine_deaths(vllm_wiring.database, job_id)) == 2
    with vllm_wiring.database.connect() as connection:
        steps = connection.execute(sa.select(sa.func.sum(batch_metric.c.num_steps))).scalar_one()
    assert steps >= 8
