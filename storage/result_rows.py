"""What a result and a window look like on their way into the database."""

from typing import Any, NamedTuple

from blend_core.engines.base import RequestFailed, RequestFinished, StepWindow
from blend_core.errors import RequestErrorCode
from storage.copying import instant_us
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.postgres_text import clean_text, cut_text
from storage.shards import Lease

_MAX_TEXT_BYTES = 1 << 20
_EXCERPT_CHARS = 1_000
_MAX_MESSAGE_CHARS = 2_000

RESULT_COLUMNS = {
    "job_id": "text", "run_id": "text", "seq": "int8", "revision": "int8", "status": "text",
    "output_text": "text", "finish_reason": "text", "num_prompt_tokens": "int8", "num_cached_tokens": "int8",
    "num_output_tokens": "int8", "error_code": "text", "error_message": "text", "started_at": "timestamptz",
    "finished_at": "timestamptz", "raw_ref": "text", "text_cleaned": "bool",
}  # fmt: skip

WINDOW_COLUMNS = {
    "job_id": "text", "run_id": "text", "rank": "int8", "batch_index": "int8", "revision": "int8",
    "started_at": "timestamptz", "duration_s": "float8", "predicted_s": "float8", "num_steps": "int8",
    "num_prefill_tokens": "int8", "num_decode_tokens": "int8", "num_cached_tokens": "int8",
    "num_recomputed_tokens": "int8", "prefill_tokens_sq": "int8", "decode_kv_tokens": "int8",
    "compute_s": "float8", "memory_s": "float8", "planned_density": "float8", "kv_usage": "float8",
    "num_running_left": "float8", "num_running_right": "float8", "num_preempted": "int8",
    "num_finished": "int8",
}  # fmt: skip


class ResultValues(NamedTuple):
    """A result of a run, in the order of `RESULT_COLUMNS`; times are seconds since the epoch."""

    seq: int
    revision: int | None
    status: str
    output_text: str | None
    finish_reason: str | None
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_output_tokens: int | None
    error_code: str | None
    error_message: str | None
    started_at: float | None
    finished_at: float
    raw_ref: str | None
    text_cleaned: bool

    def row(self, run: Run) -> tuple[Any, ...]:
        """The row of `result`. Raises `ValueError` or `OverflowError` where a time is none."""
        return (
            run.job_id, run.run_id, *self[:10], instant_us(self.started_at), instant_us(self.finished_at),
            self.raw_ref, self.text_cleaned,
        )  # fmt: skip

    def refused(self, error: Exception, now_s: float) -> "ResultValues":
        """The error row that stands for an answer which the database refused: only what it surely takes."""
        state = getattr(error, "sqlstate", None) or type(error).__name__
        return self._replace(
            revision=None, status="errored", output_text=None, finish_reason=None, num_prompt_tokens=None,
            num_cached_tokens=None, num_output_tokens=None, error_code=RequestErrorCode.ENGINE_FAILED.value,
            error_message=f"The engine's answer cannot be stored ({state}).", started_at=None,
            finished_at=now_s, raw_ref=None,
        )  # fmt: skip


def finished_values(event: RequestFinished, objects: ObjectStore, run: Run) -> ResultValues:
    """An answer; one too large for a row goes to the object store first.

    Raises:
        StorageUnavailableError: the object store did not answer.
    """
    text, is_cleaned = clean_text(event.output_text)
    raw_ref = None
    # The first comparison spares nearly every answer the encoding.
    if len(text) * 4 > _MAX_TEXT_BYTES and len(text.encode()) > _MAX_TEXT_BYTES:
        key = f"jobs/{run.job_id}/answers/{run.run_id}/{event.seq}.txt"
        raw_ref = objects.put(key, text.encode()).uri
        text = cut_text(text, _EXCERPT_CHARS)
    return ResultValues(
        event.seq, event.revision, "succeeded", text, event.finish_reason, event.num_prompt_tokens,
        event.num_cached_tokens, len(event.output_token_ids), None, None, event.started_at, event.finished_at,
        raw_ref, is_cleaned,
    )  # fmt: skip


def failed_values(event: RequestFailed) -> ResultValues:
    """A request without an answer."""
    message, is_cleaned = clean_text(cut_text(event.message, _MAX_MESSAGE_CHARS))
    return ResultValues(
        event.seq, event.revision, "errored", None, None, None, None, None, event.code.value, message, None,
        event.failed_at, None, is_cleaned,
    )  # fmt: skip


class GivenResult(NamedTuple):
    """A result as it was given to the recorder, with the lease of the rank that it comes from."""

    values: ResultValues
    lease: Lease | None


class GivenWindow(NamedTuple):
    """A window as it was given to the recorder."""

    window: StepWindow
    rank: int
    planned_density: float | None

    def row(self, run: Run) -> tuple[Any, ...]:
        """The row of `batch_metric`, in the order of `WINDOW_COLUMNS`."""
        w = self.window
        return (
            run.job_id, run.run_id, self.rank, w.batch_index, w.revision, instant_us(w.started_at),
            w.duration_s, w.predicted_s, w.num_steps, w.num_prefill_tokens, w.num_decode_tokens,
            w.num_cached_tokens, w.num_recomputed_tokens, w.prefill_tokens_sq, w.decode_kv_tokens,
            w.compute_s, w.memory_s, self.planned_density, w.kv_usage, w.num_running_left,
            w.num_running_right, w.num_preempted, w.num_finished,
        )  # fmt: skip
