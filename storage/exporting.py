"""Output and error objects in OpenAI Batch format, and the table of all results."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any, cast

import msgspec

from blend_core.errors import StorageError
from storage.database import Database
from storage.job_outputs import set_job_outputs
from storage.jobs import get_job
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.result_table import ResultTable, UploadFile
from storage.results import ResultRow, counts, iter_results

_CHAT_ENDPOINT = "/v1/chat/completions"
_COUNTED_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Where the objects are and how many requests each has.

    Attributes:
        output_uri: answers, JSONL; None where it was not asked for.
        error_uri: requests without an answer, JSONL; None where every request succeeded, too.
        table_uri: all requests, Parquet; None where it was not asked for.
        num_output: requests with an answer.
        num_error: the others.
        gone_uris: objects of long answers that are not there any more; of these answers the beginning was
            exported.
    """

    output_uri: str | None
    error_uri: str | None
    table_uri: str | None
    num_output: int
    num_error: int
    gone_uris: tuple[str, ...]


def export_job(
    db: Database,
    objects: ObjectStore,
    job_id: str,
    *,
    as_jsonl: bool = True,
    as_table: bool = True,
    run: Run,
    counted: Callable[[int, int], None] = lambda num_done, num_total: None,
) -> ExportResult:
    """Streams every result into `output.jsonl` and `errors.jsonl`, and into `results.parquet`, under a key of
    the run's own, `jobs/{job_id}/outputs/{run}/`, and records them on the job.

    One line or row per request in seq order, so that exporting again writes the same bytes. What earlier runs
    have exported is removed. `counted` is told now and then how many requests are written, and of how many.

    Raises:
        StaleRunError: the run no longer owns the job. What it wrote counts for nothing.
        StorageError: requests are pending (`close_pending` first, for an expired or cancelled job), or what
            was written does not add up to what the database counts; then no object appears.
    """
    job = get_job(db, job_id)
    expected = counts(db, job_id)
    if expected.pending:
        raise StorageError(
            f"Job {job_id} has {expected.pending} requests without a result; run it to its end "
            "before the export.",
            job_id=job_id,
        )
    encode = msgspec.json.Encoder().encode
    num_output = num_error = 0
    gone_uris: list[str] = []
    prefix = f"jobs/{job_id}/outputs/"
    folder = f"{prefix}{run.key_part}/"
    error_key = f"{folder}errors.jsonl"
    with ExitStack() as stack:
        outputs = errors = results = table = None
        if as_jsonl:
            outputs = stack.enter_context(objects.uploader(f"{folder}output.jsonl"))
            errors = stack.enter_context(objects.uploader(error_key))
        if as_table:
            results = stack.enter_context(objects.uploader(f"{folder}results.parquet"))
            table = stack.enter_context(ResultTable(cast(IO[bytes], UploadFile(results)), job_id, job.model))
        for row in iter_results(db, job_id, objects=objects, on_gone=gone_uris.append):
            is_answer = row.status == "succeeded"
            num_output, num_error = num_output + is_answer, num_error + (not is_answer)
            if is_answer and outputs is not None:
                outputs.write(encode(output_line(job_id, job.model, row)) + b"\n")
            elif errors is not None:
                errors.write(encode(error_line(job_id, row)) + b"\n")
            if table is not None:
                table.add(row)
            if (num_output + num_error) % _COUNTED_ROWS == 0:
                counted(num_output + num_error, expected.total)
        if (num_output, num_error) != (expected.succeeded, expected.total - expected.succeeded):
            raise StorageError(
                f"The export of job {job_id} has {num_output} answers and {num_error} errors where "
                f"the database counts {expected.succeeded} and {expected.total - expected.succeeded}; "
                "export again.",
                job_id=job_id,
            )
    error_uri = errors.uri if errors is not None and num_error else None
    if errors is not None and error_uri is None:
        objects.delete([error_key])
    output_uri = None if outputs is None else outputs.uri
    table_uri = None if results is None else results.uri
    set_job_outputs(db, job_id, output_uri=output_uri, error_uri=error_uri, table_uri=table_uri, run=run)
    # Keys sort by the fencing numbers of the runs: what a newer run may have written by now stays.
    objects.delete([key for key in objects.keys(prefix) if key < folder])
    return ExportResult(output_uri, error_uri, table_uri, num_output, num_error, tuple(gone_uris))


def output_line(job_id: str, model: str, row: ResultRow) -> dict[str, Any]:
    """One line of the output object, built from the columns alone."""
    assert row.finished_at is not None
    request_id = f"{job_id}-{row.seq}"
    num_prompt_tokens, num_output_tokens = row.num_prompt_tokens or 0, row.num_output_tokens or 0
    is_chat = row.endpoint == _CHAT_ENDPOINT
    choice: dict[str, Any] = {"index": 0, "finish_reason": row.finish_reason, "logprobs": None}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": row.output_text, "refusal": None}
    else:
        choice["text"] = row.output_text
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(row.finished_at.timestamp()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": row.num_cached_tokens or 0},
        },
    }
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return {"id": f"batch_req_{request_id}", "custom_id": row.custom_id, "response": response, "error": None}


def error_line(job_id: str, row: ResultRow) -> dict[str, Any]:
    """One line of the error object: the code, the reason, and the line at fault."""
    error = {
        "code": row.error_code,
        "message": row.error_message,
        "param": None,
        "line": row.source_line,
        "source": row.source_uri,
    }
    return {
        "id": f"batch_req_{job_id}-{row.seq}",
        "custom_id": row.custom_id,
        "response": None,
        "error": error,
    }
