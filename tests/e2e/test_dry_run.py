"""`blend plan` over S3, SQL and a job that has run, each command in a process of its own."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from flows.running import create_job
from flows.wiring import Wiring
from tests.e2e.command_line import PREFECT_DOWN, Blend, blend_in

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]

ON_A100 = ("--model", "llama-3.1-8b", "--device", "a100-80g")


@pytest.fixture
def blend(environment: dict[str, str], tmp_path: Path) -> Blend:
    """Runs `blend ARGUMENTS` with the stack in its environment and Prefect down."""
    return blend_in(tmp_path, os.environ | environment | PREFECT_DOWN)


def test_sources_of_a_job_file_are_planned_and_then_its_recorded_lengths(
    blend: Blend, make_job: Any, tmp_path: Path
) -> None:
    spec = make_job(num_chats=40, bad_lines=(b"{nope",), num_rows=3, options={"policy": "dfs"})
    job_file = tmp_path / "job.yaml"
    job_file.write_text(spec.model_dump_json())

    before = json.loads(blend("plan", str(job_file), "--json").stdout)
    assert (before["summary"]["num_requests"], before["invalid"]) == (43, 1)
    assert before["counted_with_tokenizer"]
    assert before["policy"] == "dfs"
    assert before["output_lengths"]["basis"] == "max_tokens"
    assert before["num_kv_tokens"] > 0

    in_s3 = json.loads(blend("plan", spec.s3[0], *ON_A100, "--json").stdout)
    assert (in_s3["summary"]["num_requests"], in_s3["invalid"]) == (40, 1)

    ran = json.loads(blend("run", str(job_file), "--json").stdout)
    results = json.loads(blend("results", ran["job_id"], "--json").stdout)["results"]
    after = json.loads(blend("plan", "--job-id", ran["job_id"], "--device", "a100-80g", "--json").stdout)
    assert (after["summary"]["num_requests"], after["invalid"]) == (43, 1)
    assert after["output_lengths"]["basis"] == "recorded"
    assert after["output_lengths"]["num_recorded"] == 43
    assert after["summary"]["num_prompt_tokens"] == before["summary"]["num_prompt_tokens"]
    assert after["policy"] == "dfs"
    recorded = sum(row["num_output_tokens"] or 0 for row in results if row["status"] == "succeeded")
    assert after["summary"]["estimated_output_tokens"] == pytest.approx(recorded, rel=0.5)

    of_chats = [row["num_output_tokens"] for row in results if str(row["custom_id"]).startswith("chat")]
    next_night = json.loads(blend("plan", str(job_file), "--json").stdout)
    told = next_night["output_lengths"]
    assert (told["basis"], told["num_recorded"]) == ("earlier_nights", 40)
    assert "the other 3 have any length" in told["assumption"]
    # Nothing is known of the three rows, which are taken to fill half of their 8 tokens.
    assert next_night["summary"]["estimated_output_tokens"] == pytest.approx(sum(of_chats) + 3 * 4.5)

    elsewhere = blend("plan", "--job-id", ran["job_id"], *ON_A100, "--deadline", "1h").stdout
    assert "43 answers are as long as the job recorded" in elsewhere
    assert "1 device (1 replica)" in elsewhere


def test_a_job_for_vllm_is_planned_with_its_context_where_there_is_no_vllm(
    blend: Blend, make_job: Any, tmp_path: Path
) -> None:
    spec = make_job(num_chats=4, num_rows=3)
    job_file = tmp_path / "job.yaml"
    options = {"engine": "vllm", "vllm": {"max_model_len": 40}}
    job_file.write_text(json.dumps(spec.model_dump(mode="json") | {"options": options}))

    told = json.loads(blend("plan", str(job_file), "--json").stdout)

    assert told["engine_name"] == "vllm"
    assert told["error_codes"] == {"prompt_too_long": 4}
    assert told["summary"]["num_requests"] == 3
    assert "vllm, simulated as sequential" in blend("plan", str(job_file)).stdout

    checked = json.loads(blend("validate", str(job_file), "--json").stdout)
    assert checked["error_codes"] == {"prompt_too_long": 4}
    assert (checked["total"], checked["valid"], checked["lengths_checked"]) == (7, 3, True)


def test_a_job_file_is_validated_as_the_job_would_check_its_sources(
    blend: Blend, make_job: Any, tmp_path: Path
) -> None:
    other = json.dumps(
        {
            "custom_id": "other",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "nobody", "messages": [{"role": "user", "content": "a"}]},
        }
    ).encode()
    spec = make_job(num_chats=2, bad_lines=(b"{nope", other), num_rows=1, options={"strict_model": True})
    job_file = tmp_path / "job.yaml"
    job_file.write_text(spec.model_dump_json())

    told = json.loads(blend("validate", str(job_file), "--json").stdout)
    ran = json.loads(blend("run", str(job_file), "--json").stdout)
    results = json.loads(blend("results", ran["job_id"], "--errors", "--json").stdout)["results"]
    assert {(error["source"], error["line"], error["code"]) for error in told["errors"]} == {
        (row["source_uri"], row["source_line"], row["error_code"]) for row in results
    }
    assert (told["total"], told["invalid"]) == (ran["total"], ran["errored"])
    assert f"{spec.s3[0]}, line 2: invalid_json: " in blend("validate", str(job_file)).stdout


def test_a_job_without_requests_yet_is_not_planned(blend: Blend, wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=1))
    done = blend("plan", "--job-id", job_id, *ON_A100, status=1)
    assert "plan its job file" in done.stderr
    assert "job_nowhere" in blend("plan", "--job-id", "job_nowhere", *ON_A100, status=1).stderr
