"""A job from its sources to its output objects, on the real stack."""

import json
from typing import Any

import pytest

from flows.job_outcome import JobOutcome
from flows.progress import SilentProgress
from flows.running import create_job, run_job
from flows.wiring import Wiring
from storage.job_sources import load_job_sources
from storage.jobs import get_job
from storage.plans import load_plan, next_revision
from storage.results import ResultRow, densities, iter_results, job_metrics

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]

BAD_LINES = (b"{", b"[1, 2]", b'{"custom_id": "no-url"}', b"\xff\xfe", b"")


def run(wiring: Wiring, spec: Any) -> JobOutcome:
    return run_job(wiring, create_job(wiring, spec), SilentProgress())


def results(wiring: Wiring, job_id: str) -> list[ResultRow]:
    return list(iter_results(wiring.database, job_id))


def exported(wiring: Wiring, uri: str) -> list[dict[str, Any]]:
    return [json.loads(line) for _, line in wiring.objects.iter_lines(uri, max_line_bytes=1 << 20)]


def test_both_sources_run_and_every_line_and_row_is_accounted_for(wiring: Wiring, make_job: Any) -> None:
    spec = make_job(num_chats=30, num_rows=20, bad_lines=BAD_LINES)

    outcome = run(wiring, spec)

    assert outcome.status == "completed"
    assert (outcome.total, outcome.succeeded, outcome.errored) == (54, 50, 4)
    assert outcome.succeeded + outcome.errored + outcome.expired + outcome.cancelled == outcome.total
    rows = results(wiring, outcome.job_id)
    good = [row for row in rows if row.status == "succeeded"]
    assert sorted(row.custom_id or "" for row in good) == sorted(
        [*(f"chat-{number}" for number in range(30)), *(str(number) for number in range(20))]
    )
    assert all(row.num_output_tokens for row in good)
    bad = [row for row in rows if row.status == "errored"]
    assert [row.source_line for row in bad] == [2, 4, 6, 8]
    assert all(row.error_code and row.error_message for row in bad)
    from_s3, from_query = load_job_sources(wiring.database, outcome.job_id)
    assert (from_s3.num_items, from_query.num_items) == (34, 20)
    assert from_s3.uri == spec.s3[0]
    assert from_s3.size_bytes


def test_outputs_and_errors_are_exported_one_to_one(wiring: Wiring, make_job: Any) -> None:
    outcome = run(wiring, make_job(num_chats=10, num_rows=5, bad_lines=BAD_LINES))

    (output_uri,), (error_uri,) = outcome.output_uris, outcome.error_uris
    answers, errors = exported(wiring, output_uri), exported(wiring, error_uri)
    assert len(answers) == len({answer["custom_id"] for answer in answers}) == 15
    assert len(errors) == 4
    assert all(answer["response"]["body"]["choices"][0]["finish_reason"] for answer in answers)


def test_windows_carry_measured_and_planned_density(wiring: Wiring, make_job: Any) -> None:
    outcome = run(wiring, make_job(num_chats=40, max_tokens=24))

    run_id = get_job(wiring.database, outcome.job_id).current_run_id
    assert run_id is not None
    windows = densities(wiring.database, run_id)
    assert [window.batch_index for window in windows] == list(range(len(windows)))
    assert all(window.planned_density is not None for window in windows)
    assert sum(window.num_finished for window in windows) == 40
    metrics = job_metrics(wiring.database, outcome.job_id)
    assert metrics.prefix_sharing is not None
    assert metrics.prefix_sharing > 0.3


def test_the_lengths_of_the_lead_requests_make_a_revision_that_runs(wiring: Wiring, make_job: Any) -> None:
    outcome = run(wiring, make_job(num_chats=160, max_tokens=48))

    assert next_revision(wiring.database, outcome.job_id) == 2
    first = load_plan(wiring.database, wiring.objects, outcome.job_id, revision=0)
    second = load_plan(wiring.database, wiring.objects, outcome.job_id, revision=1)
    assert first.lead.any()
    assert not set(second.seq.tolist()) & set(first.seq[first.lead].tolist())
    by_revision = {row.seq: row.revision for row in results(wiring, outcome.job_id)}
    assert set(by_revision.values()) == {0, 1}
    assert all(seq in second.seq for seq, revision in by_revision.items() if revision == 1)


@pytest.mark.parametrize("policy", ["fcfs", "dfs", "random"])
def test_every_policy_finishes_every_request(wiring: Wiring, make_job: Any, policy: str) -> None:
    outcome = run(wiring, make_job(num_chats=12, options={"policy": policy}))

    assert (outcome.status, outcome.succeeded) == ("completed", 12)


def test_a_job_of_bad_lines_only_completes_with_error_rows(wiring: Wiring, make_job: Any) -> None:
    outcome = run(wiring, make_job(bad_lines=BAD_LINES))

    assert (outcome.status, outcome.total, outcome.errored) == ("completed", 4, 4)
    assert outcome.error_uris


def test_a_job_that_has_ended_is_left_as_it_is(wiring: Wiring, make_job: Any) -> None:
    outcome = run(wiring, make_job(num_chats=4))
    before = results(wiring, outcome.job_id)

    again = run_job(wiring, outcome.job_id, SilentProgress())

    assert (again.status, again.succeeded) == ("completed", 4)
    assert results(wiring, outcome.job_id) == before
