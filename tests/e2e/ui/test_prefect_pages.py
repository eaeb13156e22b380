"""Prefect's pages as people use them: the form, the schedule, a run that moves, its report, Cancel."""

import json
import re
import time
from collections.abc import Callable
from typing import Any

import psutil
import psycopg
import pytest
from pages import Camera, FlowRunPage, RunForm, Stack
from playwright.sync_api import Page, expect

from flows.wiring import Wiring
from infra.supervisor import LocalStack
from storage.job_status import JobStatus
from storage.jobs import get_job, list_jobs
from storage.results import counts, iter_results

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.prefect, pytest.mark.slow]

RUN_ENDS_MS = 180_000
# The server makes the runs of a schedule once a minute, where it missed the first seconds of the deployment;
# a page that was open before then does not look again.
SERVER_SCHEDULES_S = 180.0


def deployment_id(page: Page, stack: Stack, name: str) -> str:
    found = page.request.post(f"{stack.ui_url}/api/deployments/filter", data={}).json()
    return next(str(entry["id"]) for entry in found if entry["name"] == name)


def has_scheduled_run(page: Page, stack: Stack, deployment: str) -> bool:
    of_deployment = {
        "deployments": {"id": {"any_": [deployment]}},
        "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
    }
    return bool(page.request.post(f"{stack.ui_url}/api/flow_runs/filter", data=of_deployment).json())


def ad_hoc_form(page: Page, stack: Stack) -> RunForm:
    return RunForm(page, stack.ui_url, deployment_id(page, stack, "ad-hoc"))


def uploaded(wiring: Wiring, key: str, num_requests: int, max_tokens: int) -> str:
    """The address of a request file with one bad line at its end."""
    shared = "Please read the report and answer the question. " * 6
    lines = [
        json.dumps(
            {
                "custom_id": f"chat-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "messages": [{"role": "user", "content": f"{shared}Question {number}."}],
                    "max_tokens": max_tokens,
                },
            }
        )
        for number in range(num_requests)
    ]
    return wiring.objects.put(key, "\n".join([*lines, "{nope"]).encode()).uri


def wait_until(what: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, f"nothing came within {timeout_s:.0f} s"
        time.sleep(0.2)


def job_named(wiring: Wiring, name: str) -> str:
    return next(job.job_id for job in list_jobs(wiring.database, limit=50) if job.name == name)


def test_the_form_tells_of_every_field_what_it_is_and_what_may_be_given(page: Page, stack: Stack) -> None:
    form = ad_hoc_form(page, stack)

    expect(form.field("S3 addresses")).to_contain_text("s3://bucket/folder/")
    expect(form.control("Model")).to_have_value("smollm2-135m")
    expect(form.field("Completion window in hours")).to_contain_text("more than 0, at most a year (8760)")
    expect(form.control("Completion window in hours")).to_have_value("24")
    expect(form.control("Longest answer")).to_have_value("256")
    assert form.choose("Policy", "fcfs") == ["density_matched", "dual_scan", "dfs", "fcfs", "random"]
    assert form.choose("Engine", "torch") == ["auto", "vllm", "torch"]
    expect(form.control("vLLM options")).to_have_value("{}")
    expect(form.field("vLLM options")).to_contain_text('in the form as JSON: {"max_model_len": 4096}')
    assert form.choose("Repeated custom_id", "job") == ["row", "job"]
    expect(form.field("job_id")).to_contain_text("Leave it at None to make a new job")
    form.add_item("SQL queries")
    expect(form.field("Prompt")).to_contain_text("{{ body }}")
    expect(form.control("Connection")).to_have_value("platform")
    form.add_item("Parquet tables")
    expect(form.field("S3 address")).to_contain_text("Parquet objects, addressed as under")
    expect(form.field("Outputs")).to_contain_text("one table of all requests")


def test_a_job_filled_in_by_hand_runs_to_its_end_and_shows_its_report(
    page: Page, stack: Stack, wiring: Wiring, camera: Camera
) -> None:
    address = uploaded(wiring, "ui/tickets.jsonl", num_requests=60, max_tokens=24)
    with psycopg.connect(wiring.endpoints.database_url) as connection:
        connection.execute(
            "CREATE TABLE ui_ticket AS SELECT n AS id, 'ticket ' || n AS body FROM generate_series(1, 5) n"
        )
    form = ad_hoc_form(page, stack)
    form.control("Name").fill("tickets of today")
    form.control("Model").fill("tiny-llama")
    form.add_item("S3 addresses")
    form.control("S3 addresses").fill(address)
    camera.take(page, "form", height_px=1000)
    form.add_item("SQL queries")
    form.control("Query").fill("SELECT id, body FROM ui_ticket ORDER BY id")
    form.control("Prompt").fill("Summarise: {{ body }}")
    form.choose("Policy", "dfs")
    form.control("Longest answer").fill("8")
    run = FlowRunPage(page, stack.ui_url, form.submit_and_get_run())

    expect(run.state).to_have_text("Completed", timeout=RUN_ENDS_MS)
    expect(page.get_by_text("tickets of today").first).to_be_visible()
    job = get_job(wiring.database, job_named(wiring, "tickets of today"))
    assert (job.status, job.num_succeeded, job.num_errored, job.num_total) == (JobStatus.COMPLETED, 65, 1, 66)
    assert job.spec["options"]["policy"] == "dfs"
    answers = [row for row in iter_results(wiring.database, job.job_id) if row.status == "succeeded"]
    assert len(answers) == 65
    assert all(row.output_text is not None and row.num_output_tokens for row in answers)

    run.open_tab("Task Runs")
    for stage in ("ingest", "plan", "infer", "export", "report"):
        expect(page.get_by_role("link", name=stage, exact=True)).to_be_visible()
    run.open_tab("Artifacts")
    expect(run.artifact("progress")).to_contain_text("65 succeeded + 1 errored")
    camera.take(page, "artifacts")
    run.open_artifact("summary")
    expect(page.get_by_role("heading", name=f"Job {job.job_id}")).to_be_visible()
    expect(
        page.get_by_role("cell", name="65 succeeded + 1 errored + 0 expired + 0 cancelled = 66")
    ).to_be_visible()
    expect(page.get_by_role("row", name="invalid_json 1")).to_be_visible()
    expect(page.get_by_text(str(job.output_uri))).to_be_visible()
    expect(page.get_by_text(str(job.table_uri))).to_be_visible()
    expect(page.get_by_role("columnheader", name="planned")).to_be_visible()
    assert "|---" not in page.locator("body").inner_text()
    camera.take(page, "report", height_px=1100)
    page.go_back()
    run.open_tab("Artifacts")
    run.open_artifact("density")
    expect(page.get_by_role("columnheader", name="prefill")).to_be_visible()
    cells = page.get_by_role("row").nth(1).get_by_role("cell").all_inner_texts()
    assert all(re.fullmatch(r"[\d,.%-]+", cell.strip()) and len(cell) < 9 for cell in cells), cells


def test_values_that_cannot_be_are_refused_in_the_form(page: Page, stack: Stack, wiring: Wiring) -> None:
    before = list_jobs(wiring.database, limit=50)
    form = ad_hoc_form(page, stack)
    form.add_item("S3 addresses")
    form.control("S3 addresses").fill("http://bucket/requests.jsonl")
    form.submit()
    expect(form.field("S3 addresses")).to_contain_text(
        "'http://bucket/requests.jsonl' does not match '^s3://"
    )

    form.control("S3 addresses").fill("s3://bucket/requests.jsonl")
    form.control("Completion window in hours").fill("0")
    form.submit()
    refused = page.get_by_text("'job.completion_window_hours'. Failure reason: 0 is less than or equal to")
    expect(refused.first).to_be_visible()
    expect(page).to_have_url(re.compile("/run$"))

    form.control("Completion window in hours").fill("8")
    form.control("vLLM options").fill('{"max_model_length": 1024}')
    form.submit()
    expect(form.field("vLLM options")).to_contain_text("'max_model_length' is not one of ['")
    expect(page).to_have_url(re.compile("/run$"))
    assert list_jobs(wiring.database, limit=50) == before


def test_options_of_vllm_are_in_the_run_that_the_form_makes(page: Page, stack: Stack, camera: Camera) -> None:
    form = ad_hoc_form(page, stack)
    form.add_item("S3 addresses")
    form.control("S3 addresses").fill("s3://bucket/requests.jsonl")
    form.choose("Engine", "vllm")
    form.control("vLLM options").fill('{"max_model_len": 1024}')
    form.show("Engine")
    camera.take(page, "options", height_px=540)

    run_id = form.submit_and_get_run()

    made = page.request.get(f"{stack.ui_url}/api/flow_runs/{run_id}").json()
    options = made["parameters"]["job"]["options"]
    assert (options["engine"], options["vllm"]) == ("vllm", {"max_model_len": 1024})
    # Without vLLM, or without that bucket; no other test may find it running.
    expect(FlowRunPage(page, stack.ui_url, run_id).state).to_have_text("Failed", timeout=RUN_ENDS_MS)


def test_a_job_without_a_source_fails_with_the_sentence_that_says_what_to_give(
    page: Page, stack: Stack
) -> None:
    run = FlowRunPage(page, stack.ui_url, ad_hoc_form(page, stack).submit_and_get_run())

    expect(run.state).to_have_text("Failed", timeout=RUN_ENDS_MS)
    sentence = "job: the job has no source; give `s3` addresses, `parquet` tables or `sql` queries"
    expect(page.locator("body")).to_contain_text(sentence)


def test_the_nightly_schedule_is_shown_and_can_be_paused_and_resumed(
    page: Page, stack: Stack, camera: Camera
) -> None:
    nightly = deployment_id(page, stack, "nightly")
    wait_until(lambda: has_scheduled_run(page, stack, nightly), timeout_s=SERVER_SCHEDULES_S)
    page.goto(f"{stack.ui_url}/deployments/deployment/{nightly}")

    schedule = page.get_by_text("At 02:30 AM every day").first
    in_full = page.get_by_text("At 02:30 AM every day (Europe/Berlin)")

    def is_told_in_full() -> bool:
        # The page draws the schedule anew while it loads, and what the mouse is over goes with it.
        page.mouse.move(0, 0)
        schedule.hover()
        page.wait_for_timeout(500)
        return in_full.is_visible()

    wait_until(is_told_in_full)
    # 02:30 in Berlin, in the browser's time zone: summer or winter.
    next_run = re.compile(r"Scheduled for .* (12|01):30:00 AM")
    expect(page.get_by_text(next_run).first).to_be_visible()
    camera.take(page, "nightly", height_px=600)
    switch = page.get_by_role("switch")
    expect(switch).to_be_checked()
    switch.click()
    expect(switch).not_to_be_checked()
    expect(page.get_by_text("Deployment schedule inactive").first).to_be_visible()
    page.reload()
    expect(switch).not_to_be_checked()
    expect(page.get_by_text(next_run)).to_have_count(0)
    switch.click()
    expect(page.get_by_text("Deployment schedule active").first).to_be_visible()
    page.reload()
    expect(switch).to_be_checked()
    page.locator(".p-tab", has_text="Description").click()
    expect(
        page.get_by_text("by the cron expression 30 2 * * * in the time zone Europe/Berlin")
    ).to_be_visible()


def test_a_run_moves_while_it_is_watched_and_cancel_ends_it_with_its_answers_kept(
    page: Page, stack: Stack, wiring: Wiring, camera: Camera
) -> None:
    form = ad_hoc_form(page, stack)
    form.control("Name").fill("a long night")
    form.control("Model").fill("tiny-llama")
    form.add_item("S3 addresses")
    form.control("S3 addresses").fill(uploaded(wiring, "ui/long.jsonl", num_requests=1_200, max_tokens=400))
    serve = next(status for status in LocalStack(stack.home).status() if status.name == "serve")
    assert serve.pid is not None
    server = psutil.Process(serve.pid)
    run = FlowRunPage(page, stack.ui_url, form.submit_and_get_run())

    expect(run.state).to_have_text("Running")
    run.open_tab("Artifacts")
    bar = run.artifact("progress")
    expect(bar).to_contain_text(
        re.compile(r"[1-9]\d* of 1,201 requests, [\d,]+ tokens/s"), timeout=RUN_ENDS_MS
    )
    seen = bar.inner_text()
    expect(bar).not_to_contain_text(seen.splitlines()[-1])
    camera.take(page, "progress")
    run.open_tab("Logs")
    expect(page.get_by_text("infer: runs tiny-llama")).to_be_visible()
    job_id = job_named(wiring, "a long night")
    wait_until(lambda: counts(wiring.database, job_id).succeeded >= 1)
    tree = server.children(recursive=True)
    assert len(tree) >= 2, "the flow run and its engine"

    run.cancel()

    expect(run.state).to_have_text("Cancelled", timeout=RUN_ENDS_MS)
    assert psutil.wait_procs(tree, timeout=60)[1] == []
    job = get_job(wiring.database, job_id)
    assert job.status is JobStatus.CANCELLED
    assert job.num_succeeded >= 1
    assert job.num_cancelled >= 1
    assert job.num_succeeded + job.num_errored + job.num_cancelled == job.num_total == 1_201
    assert job.output_uri
    run.open_tab("Artifacts")
    expect(run.artifact("summary")).to_contain_text(f"Job {job_id} cancelled")
