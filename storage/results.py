"""Reading back: counts, results, densities."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from blend_core.errors import ObjectGoneError
from storage.database import Database
from storage.jobs import get_job
from storage.objects import ObjectStore, split_uri
from storage.schema import batch_metric, result

_FETCH_ROWS = 200  # an answer may have a megabyte


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests of a job by state."""

    total: int
    succeeded: int
    errored: int
    expired: int
    cancelled: int

    @property
    def pending(self) -> int:
        """Requests without a result."""
        return self.total - self.succeeded - self.errored - self.expired - self.cancelled


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A request with its result; what the result says is None while it is pending.

    Attributes:
        seq: number in the job.
        custom_id: the user's own id.
        source_uri: where it was read.
        source_line: line or row there, from 1.
        endpoint: OpenAI endpoint it is written for.
        status: succeeded, errored, expired, cancelled, or None for pending.
        output_text: the answer; only the beginning of a long one whose object is gone.
        finish_reason: stop or length.
        num_prompt_tokens: of the result, else of the request.
        num_cached_tokens: prompt tokens served from the cache.
        num_output_tokens: tokens of the answer.
        error_code: why there is no answer.
        error_message: the same in one sentence.
        started_at: first admission.
        finished_at: last token, or when the error was found.
        run_id: the run that answered.
        revision: plan revision in force.
        prompt_excerpt: first characters of the prompt, or of the line or row at fault.
    """

    seq: int
    custom_id: str | None
    source_uri: str
    source_line: int
    endpoint: str | None
    status: str | None
    output_text: str | None
    finish_reason: str | None
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_output_tokens: int | None
    error_code: str | None
    error_message: str | None
    started_at: datetime | None
    finished_at: datetime | None
    run_id: str | None
    revision: int | None
    prompt_excerpt: str | None


@dataclass(frozen=True, slots=True)
class DensityRow:
    """One window of a run; the comments on `batch_metric` say what each value is."""

    rank: int
    batch_index: int
    revision: int
    started_at: datetime
    duration_s: float
    predicted_s: float
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_cached_tokens: int
    num_recomputed_tokens: int
    prefill_tokens_sq: int
    decode_kv_tokens: int
    compute_s: float
    memory_s: float
    planned_density: float | None
    measured_density: float | None
    kv_usage: float
    num_running_left: float
    num_running_right: float
    num_preempted: int
    num_finished: int


@dataclass(frozen=True, slots=True)
class JobMetrics:
    """What a job did, over all its runs.

    Attributes:
        num_prompt_tokens: prompt tokens of all answers, cached ones included.
        num_cached_tokens: those served from the cache.
        num_output_tokens: tokens of all answers.
        num_batches: windows measured.
        busy_s: seconds in which its runs executed: per run from the first window's start to the last one's
            end.
        tokens_per_s: prompt tokens, cached ones included, and decoded tokens per busy second, as in
            `run_summary`; None where nothing ran.
        output_tokens_per_s: output tokens per busy second; None where nothing ran.
        prefix_sharing: measured share of prompt tokens served from the cache; None where nothing ran.
        compute_s: seconds of compute at the device's peak.
        memory_s: seconds of KV reading at the device's peak bandwidth.
        num_preempted: preemptions.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_batches: int
    busy_s: float
    tokens_per_s: float | None
    output_tokens_per_s: float | None
    prefix_sharing: float | None
    compute_s: float
    memory_s: float
    num_preempted: int


def counts(db: Database, job_id: str) -> Counts:
    """Cheap: reads the counters that are written in the same transactions as the results."""
    job = get_job(db, job_id)
    return Counts(job.num_total, job.num_succeeded, job.num_errored, job.num_expired, job.num_cancelled)


def pending_seqs(db: Database, job_id: str) -> npt.NDArray[np.int64]:
    """Requests without a result, ascending, `(num_pending,)`."""
    with db.raw() as connection, connection.cursor(name="pending", binary=True) as cursor:
        cursor.itersize = 100_000
        cursor.execute(
            "SELECT q.seq FROM request q WHERE q.job_id = %s AND NOT EXISTS"
            " (SELECT FROM result r WHERE r.job_id = q.job_id AND r.seq = q.seq) ORDER BY q.seq",
            (job_id,),
        )
        return np.fromiter((seq for (seq,) in cursor), dtype=np.int64)


def iter_results(
    db: Database,
    job_id: str,
    *,
    objects: ObjectStore | None = None,
    limit: int | None = None,
    on_gone: Callable[[str], object] = lambda uri: None,
) -> Iterator[ResultRow]:
    """Every request with its result in seq order, streamed by a server-side cursor.

    An answer too large for a row is fetched from `objects`; without them the row has its beginning. Where its
    object is gone, the row has the beginning and a line that says so, and `on_gone` is told the object.
    """
    with db.raw() as connection, connection.cursor(name="results") as cursor:
        cursor.itersize = _FETCH_ROWS
        cursor.execute(
            "SELECT q.seq, q.custom_id, q.source_uri, q.source_line, q.endpoint, r.status, r.output_text,"
            " r.finish_reason, coalesce(r.num_prompt_tokens, q.num_prompt_tokens), r.num_cached_tokens,"
            " r.num_output_tokens, r.error_code, r.error_message, r.started_at, r.finished_at, r.run_id,"
            " r.revision, q.prompt_excerpt, r.raw_ref"
            " FROM request q LEFT JOIN result r ON r.job_id = q.job_id AND r.seq = q.seq"
            " WHERE q.job_id = %s ORDER BY q.seq LIMIT %s",
            (job_id, limit),
        )
        for *values, raw_ref in cursor:
            if raw_ref is not None and objects is not None:
                try:
                    values[6] = objects.get(split_uri(raw_ref)[1]).decode()
                except ObjectGoneError:
                    on_gone(raw_ref)
                    values[6] += f"\n[The rest of this answer is gone: there is no {raw_ref} any more.]"
            yield ResultRow(*values)


def densities(db: Database, run_id: str) -> list[DensityRow]:
    """Windows of a run in order of time."""
    columns = [batch_metric.c[field.name] for field in fields(DensityRow)]
    order = (batch_metric.c.started_at, batch_metric.c.rank, batch_metric.c.batch_index)
    with db.connect() as connection:
        rows = connection.execute(sa.select(*columns).where(batch_metric.c.run_id == run_id).order_by(*order))
        return [DensityRow(*row) for row in rows]


def error_code_counts(db: Database, job_id: str) -> dict[str, int]:
    """How many error rows each code has, the most frequent first."""
    number = sa.func.count()
    statement = (
        sa.select(result.c.error_code, number)
        .where(result.c.job_id == job_id, result.c.error_code.is_not(None))
        .group_by(result.c.error_code)
        .order_by(number.desc(), result.c.error_code)
    )
    with db.connect() as connection:
        return dict(connection.execute(statement).all())


def output_lengths(db: Database, job_id: str, seqs: Sequence[int]) -> dict[int, int]:
    """Output tokens by seq of those requests that succeeded."""
    statement = sa.select(result.c.seq, result.c.num_output_tokens).where(
        result.c.job_id == job_id,
        # One array, not one parameter each: a statement takes 65,535 parameters.
        result.c.seq == sa.any_(sa.literal(list(seqs), ARRAY(sa.BigInteger))),
        result.c.status == "succeeded",
    )
    with db.connect() as connection:
        return dict(connection.execute(statement).all())


def job_metrics(db: Database, job_id: str) -> JobMetrics:
    """Tokens, rates, measured prefix sharing and batches of a job."""

    def total(column: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
        return sa.func.coalesce(sa.func.sum(column), 0)

    tokens = sa.select(
        total(result.c.num_prompt_tokens),
        total(result.c.num_cached_tokens),
        total(result.c.num_output_tokens),
    ).where(result.c.job_id == job_id, result.c.status == "succeeded")
    windows = sa.text(
        "SELECT coalesce(sum(num_batches), 0), coalesce(sum(busy_s), 0), coalesce(sum(compute_s), 0),"
        " coalesce(sum(memory_s), 0), coalesce(sum(num_preempted), 0),"
        " coalesce(sum(num_prefill_tokens + num_cached_tokens + num_decode_tokens), 0)"
        " FROM run_summary WHERE job_id = :job_id"
    )
    with db.connect() as connection:
        prompt, cached, output = map(int, connection.execute(tokens).one())
        num_batches, busy_s, compute_s, memory_s, preempted, handled = connection.execute(
            windows, {"job_id": job_id}
        ).one()
    return JobMetrics(
        num_prompt_tokens=prompt,
        num_cached_tokens=cached,
        num_output_tokens=output,
        num_batches=int(num_batches),
        busy_s=busy_s,
        tokens_per_s=int(handled) / busy_s if busy_s else None,
        output_tokens_per_s=output / busy_s if busy_s else None,
        prefix_sharing=cached / prompt if prompt else None,
        compute_s=compute_s,
        memory_s=memory_s,
        num_preempted=int(preempted),
    )
