import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blend_core.engines.base import RequestFailed, RequestFinished
from blend_core.errors import ObjectGoneError, StorageError
from storage.database import Database
from storage.exporting import export_job
from storage.job_status import JobStatus
from storage.jobs import close_pending, get_job, set_job_status
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.plans import load_plan, load_plan_summary, next_revision, save_plan
from storage.recorder import Recorder
from storage.result_table import SCHEMA, ResultTable
from storage.results import ResultRow
from tests.integration.storage.plans import plan_of

pytestmark = [pytest.mark.postgres, pytest.mark.s3]


def test_revisions_are_added_and_the_newest_is_read(
    db: Database, objects: ObjectStore, make_job: Callable[..., str], take_job: Callable[[str], Run]
) -> None:
    job_id = make_job()
    assert next_revision(db, job_id) == 0
    with pytest.raises(StorageError, match="has no plan"):
        load_plan(db, objects, job_id)
    assert load_plan_summary(db, job_id) is None
    save_plan(db, objects, job_id, plan_of(0))
    save_plan(db, objects, job_id, plan_of(1), run=take_job(job_id))
    assert next_revision(db, job_id) == 2
    assert load_plan(db, objects, job_id).revision == 1
    first = load_plan(db, objects, job_id, revision=0)
    assert (first.seq.tolist(), first.summary) == ([1, 0], plan_of(0).summary)
    assert load_plan_summary(db, job_id) == plan_of(0).summary
    with pytest.raises(StorageError, match="revision 1 already"):
        save_plan(db, objects, job_id, plan_of(1))
    assert len(objects.keys(f"jobs/{job_id}/plans/")) == 2


def test_a_plan_that_is_gone_says_how_to_end_its_job(
    db: Database, objects: ObjectStore, make_job: Callable[..., str]
) -> None:
    job_id = make_job()
    save_plan(db, objects, job_id, plan_of(0))
    objects.delete(objects.keys(f"jobs/{job_id}/plans/"))
    with pytest.raises(ObjectGoneError, match=r"is gone, and its job .* `blend cancel` ends the job"):
        load_plan(db, objects, job_id)


def lines(objects: ObjectStore, uri: str | None) -> list[dict[str, object]]:
    assert uri is not None
    return [json.loads(line) for _, line in objects.iter_lines(uri, max_line_bytes=1 << 20)]


def test_answers_and_errors_are_exported_in_openai_batch_format(
    db: Database,
    objects: ObjectStore,
    make_job: Callable[..., str],
    take_job: Callable[[str], Run],
    answer: Callable[..., RequestFinished],
    failure: Callable[[int], RequestFailed],
) -> None:
    job_id = make_job(num_valid=4, num_bad=1)
    run = take_job(job_id)
    with Recorder(db, objects, run) as recorder:
        recorder.finished(answer(0))
        recorder.failed(failure(1))
        recorder.finished(replace(answer(2), finish_reason="length"))
    with pytest.raises(StorageError, match="1 requests without a result"):
        export_job(db, objects, job_id, run=run)
    close_pending(db, job_id, JobStatus.EXPIRED, run=run)
    exported = export_job(db, objects, job_id, run=run)
    assert (exported.num_output, exported.num_error) == (2, 3)
    output = lines(objects, exported.output_uri)
    assert output[0] == {
        "id": f"batch_req_{job_id}-0",
        "custom_id": "id-0",
        "response": {
            "status_code": 200,
            "request_id": f"{job_id}-0",
            "body": {
                "id": f"chatcmpl-{job_id}-0",
                "object": "chat.completion",
                "created": 1_700_000_001,
                "model": "tiny",
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": "stop",
                        "logprobs": None,
                        "message": {"role": "assistant", "content": "Paris.", "refusal": None},
                    }
                ],
                "usage": {
                    "prompt_tokens": 10,
                    "completion_tokens": 3,
                    "total_tokens": 13,
                    "prompt_tokens_details": {"cached_tokens": 4},
                },
            },
        },
        "error": None,
    }
    errors = lines(objects, exported.error_uri)
    assert [(line["custom_id"], line["error"]["code"], line["error"]["line"]) for line in errors] == [  # type: ignore[index]
        ("id-1", "timed_out", 2),
        ("id-3", "batch_expired", 4),
        (None, "invalid_json", 5),
    ]
    job = get_job(db, job_id)
    assert (job.output_uri, job.error_uri) == (exported.output_uri, exported.error_uri)
    assert job.table_uri == exported.table_uri
    assert set_job_status(db, job_id, JobStatus.EXPIRED, run=run).num_succeeded == 2


def test_a_long_answer_whose_object_is_gone_is_exported_with_its_beginning(
    db: Database,
    objects: ObjectStore,
    make_job: Callable[..., str],
    take_job: Callable[[str], Run],
    answer: Callable[..., RequestFinished],
) -> None:
    job_id = make_job(num_valid=2)
    run = take_job(job_id)
    with Recorder(db, objects, run) as recorder:
        recorder.finished(answer(0, "a" * 2_000_000))
        recorder.finished(answer(1, "b" * 2_000_000))
    gone = f"jobs/{job_id}/answers/{run.run_id}/0.txt"
    objects.delete([gone])

    exported = export_job(db, objects, job_id, run=run)

    assert (exported.num_output, exported.gone_uris) == (2, (objects.uri(gone),))
    content = b"".join(objects.get(key) for key in objects.keys(f"jobs/{job_id}/outputs/") if "jsonl" in key)
    first, second = (
        json.loads(line)["response"]["body"]["choices"][0]["message"]["content"]
        for line in content.splitlines()
    )
    assert first.startswith("a" * 900)
    assert first.endswith(f"\n[The rest of this answer is gone: there is no {objects.uri(gone)} any more.]")
    assert second == "b" * 2_000_000


def test_a_job_without_errors_has_no_error_object_and_exports_the_same_again(
    db: Database,
    objects: ObjectStore,
    make_job: Callable[..., str],
    take_job: Callable[[str], Run],
    answer: Callable[..., RequestFinished],
) -> None:
    job_id = make_job(num_valid=1)
    run = take_job(job_id)
    with Recorder(db, objects, run) as recorder:
        recorder.finished(answer(0))
    first = export_job(db, objects, job_id, run=run)
    key = f"jobs/{job_id}/outputs/{run.key_part}/output.jsonl"
    assert first.output_uri == objects.uri(key)
    content = objects.get(key)
    assert first.error_uri is None
    assert export_job(db, objects, job_id, run=run) == first
    assert objects.get(key) == content
    assert not any("errors" in key for key in objects.keys(f"jobs/{job_id}/"))


def table_of(objects: ObjectStore, run: Run) -> pa.Table:
    key = f"jobs/{run.job_id}/outputs/{run.key_part}/results.parquet"
    return pq.read_table(pa.BufferReader(objects.get(key)))


def test_all_results_are_one_table_of_a_fixed_schema(
    db: Database,
    objects: ObjectStore,
    make_job: Callable[..., str],
    take_job: Callable[[str], Run],
    answer: Callable[..., RequestFinished],
    failure: Callable[[int], RequestFailed],
) -> None:
    all_good, mixed = make_job(num_valid=1), make_job(num_valid=2, num_bad=1)
    runs = [take_job(job_id) for job_id in (all_good, mixed)]
    with Recorder(db, objects, runs[0]) as recorder:
        recorder.finished(answer(0))
    with Recorder(db, objects, runs[1]) as recorder:
        recorder.finished(answer(0))
        recorder.failed(failure(1))
    for run in runs:
        export_job(db, objects, run.job_id, run=run)
    # No error at all, and then some: the columns are the same, so that both read as one.
    assert table_of(objects, runs[0]).schema == table_of(objects, runs[1]).schema == SCHEMA
    good, failed, bad = table_of(objects, runs[1]).to_pylist()
    assert (good["custom_id"], good["output_text"], good["error_code"]) == ("id-0", "Paris.", None)
    assert good["finished_at"] == datetime(2023, 11, 14, 22, 13, 21, 500_000, tzinfo=UTC)
    found = (failed["custom_id"], failed["error_code"], failed["prompt_excerpt"])
    assert found == ("id-1", "timed_out", "Hello")
    assert (bad["custom_id"], bad["status"], bad["source_line"]) == (None, "errored", 3)
    assert (bad["error_code"], bad["prompt_excerpt"]) == ("invalid_json", "{broken")


def test_a_job_chooses_what_is_exported(
    db: Database,
    objects: ObjectStore,
    make_job: Callable[..., str],
    take_job: Callable[[str], Run],
    answer: Callable[..., RequestFinished],
) -> None:
    job_id = make_job(num_valid=1)
    run = take_job(job_id)
    with Recorder(db, objects, run) as recorder:
        recorder.finished(answer(0))
    exported = export_job(db, objects, job_id, as_jsonl=False, run=run)
    assert (exported.output_uri, exported.error_uri, exported.num_output) == (None, None, 1)
    assert not any("jsonl" in key for key in objects.keys(f"jobs/{job_id}/"))
    assert export_job(db, objects, job_id, as_table=False, run=run).table_uri is None


def test_a_table_is_written_in_row_groups_of_bounded_size(tmp_path: Path) -> None:
    row = ResultRow(
        seq=0, custom_id=None, source_uri="s3://b/k", source_line=1, endpoint=None, status="succeeded",
        output_text="x" * 1_000_000, finish_reason="stop", num_prompt_tokens=1, num_cached_tokens=0,
        num_output_tokens=1, error_code=None, error_message=None, started_at=None, finished_at=None,
        run_id=None, revision=None, prompt_excerpt=None,
    )  # fmt: skip
    path = tmp_path / "t.parquet"
    with path.open("wb") as file, ResultTable(file, "job", "tiny") as table:
        for seq in range(100):
            table.add(replace(row, seq=seq))
    metadata = pq.read_metadata(path)
    assert metadata.num_rows == 100
    assert max(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)) < 40
    assert pq.read_table(path)["seq"].to_pylist() == list(range(100))
