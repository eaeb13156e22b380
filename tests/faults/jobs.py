"""Jobs of several hundred small requests: made, handed to the deployment, watched and read back."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from faults.checks import Admission, ExportedLine, Item, JobRecord, RequestRow, ResultRow, Snapshot

from flows.deployments import resubmit_job, submit_job
from flows.job_spec import BatchJobSpec
from flows.wiring import Wiring
from storage.job_status import JobStatus

STAGES = ("ingest", "plan", "infer", "export", "report")
NUM_ROWS = 60
BAD_LINES = (b"{", b"[1, 2]", b'{"custom_id": "no-body", "method": "POST", "url": "/v1/chat/completions"}')
WORDS = [
    "red",
    "green",
    "blue",
    "small",
    "large",
    "early",
    "late",
    "north",
    "south",
    "river",
    "hill",
    "road",
    "kettle",
    "invoice",
    "order",
]

_STANDING = """
SELECT j.status, j.ingested_at IS NOT NULL, EXISTS (SELECT FROM plan p WHERE p.job_id = j.job_id),
       j.num_succeeded + j.num_errored + j.num_expired + j.num_cancelled, j.num_total,
       (SELECT run_id FROM run r WHERE r.job_id = j.job_id AND r.status = 'running')
FROM batch_job j WHERE j.job_id = %s
"""
_END_STATES = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a job is.

    Attributes:
        stage: one of `STAGES`, or None where no run executes it.
        num_done: requests with a result.
        num_total: requests that are known.
        run_id: the run that executes it.
        is_ended: whether the job is in an end state.
    """

    stage: str | None
    num_done: int
    num_total: int
    run_id: str | None
    is_ended: bool

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do, the report included."""
        return self.is_ended and self.run_id is None

    @property
    def rank(self) -> int:
        """The number of its stage; one more when all is over, -1 where no run executes it."""
        if self.is_over:
            return len(STAGES)
        return -1 if self.stage is None else STAGES.index(self.stage)


@dataclass(frozen=True, slots=True)
class Job:
    """A submitted job and what was put into its sources."""

    job_id: str
    items: tuple[Item, ...]


def make_model(folder: Path) -> str:
    """The tiny random model's folder."""
    from tiny_llama import make_tiny_llama

    return str(make_tiny_llama(folder))


def make_table(wiring: Wiring) -> None:
    """The rows that the jobs' query reads."""
    with psycopg.connect(wiring.endpoints.database_url) as connection:
        connection.execute("CREATE TABLE fault_ticket (id int PRIMARY KEY, body text NOT NULL)")
        connection.execute(
            "INSERT INTO fault_ticket SELECT n, 'ticket ' || n FROM generate_series(1, %s) AS n", (NUM_ROWS,)
        )


def submit(
    wiring: Wiring, model: str, rng: random.Random, *, number: int, num_lines: int, num_ranks: int
) -> Job:
    """Puts new lines into S3 and submits a job over them and the table."""
    lines = [_chat_line(number, index, rng) for index in range(num_lines)]
    ids: list[str | None] = [f"job{number}-{index}" for index in range(num_lines)]
    for bad in BAD_LINES:
        place = rng.randrange(len(lines))
        lines.insert(place, bad)
        ids.insert(place, "no-body" if b"custom_id" in bad else None)
    uri = wiring.objects.put(f"faults/{number}.jsonl", b"\n".join(lines) + b"\n").uri
    spec = BatchJobSpec.model_validate(
        {
            "name": f"faults {number}",
            "model": model,
            "s3": [uri],
            "options": {"ranks": num_ranks},
            "sql": [
                {
                    "query": "SELECT id, body FROM fault_ticket ORDER BY id",
                    "prompt": "Please label {{ body }}.",
                    "max_tokens": 12,
                }
            ],
        }
    )
    items = [Item(uri, line, custom_id) for line, custom_id in enumerate(ids, 1)]
    items += [Item("sql:1", row, str(row)) for row in range(1, NUM_ROWS + 1)]
    return Job(submit_job(wiring, spec).job_id, tuple(items))


def run_again(wiring: Wiring, job: Job) -> None:
    """Hands the job to the deployment again, as `blend submit --job-id` does."""
    resubmit_job(wiring, job.job_id)


class Watch:
    """A database session that looks at jobs; it is opened again when it was lost."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._connection: psycopg.Connection[Any] | None = None

    def standing(self, job: Job) -> Standing:
        """How far the job is. Raises `psycopg.Error` or `StorageUnavailableError` while Postgres is away."""
        status, is_ingested, is_planned, num_done, num_total, run_id = self._rows(_STANDING, job)[0]
        is_ended = status in _END_STATES
        stage = None
        if run_id is not None:
            if is_ended:
                stage = "report"
            elif status == "finalizing":
                stage = "export"
            elif not is_ingested:
                stage = "ingest"
            else:
                stage = "infer" if is_planned else "plan"
        return Standing(stage, num_done, num_total, run_id, is_ended)

    def results(self, job: Job) -> dict[int, ResultRow]:
        """The job's committed results by seq; none before its ingest is complete, which may begin anew."""
        rows = self._rows(
            "SELECT r.seq, r.status, r.run_id, r.finished_at::text FROM result r"
            " JOIN batch_job j USING (job_id) WHERE j.job_id = %s AND j.ingested_at IS NOT NULL",
            job,
        )
        return {row[0]: ResultRow(*row) for row in rows}

    def has_answer_after(self, job: Job, at_s: float) -> bool:
        """Whether a committed answer was finished after a time, in seconds since the epoch."""
        return bool(
            self._rows(
                "SELECT FROM result WHERE job_id = %s AND run_id IS NOT NULL"
                " AND finished_at > to_timestamp(%s) LIMIT 1",
                job,
                at_s,
            )
        )

    def run_ended_before(self, job: Job, run_id: str, at_s: float) -> bool:
        """Whether a run had ended at a time."""
        rows = self._rows(
            "SELECT extract(epoch FROM finished_at)::float8 FROM run WHERE job_id = %s AND run_id = %s",
            job,
            run_id,
        )
        return rows[0][0] is not None and rows[0][0] < at_s

    def record(self, job: Job, snapshots: Sequence[Snapshot], admissions_file: Path) -> JobRecord:
        """Everything about an ended job, from the database, the exported objects and the observer."""
        requests = self._rows(
            "SELECT seq, source_uri, source_line, custom_id FROM request WHERE job_id = %s", job
        )
        results = self._rows(
            "SELECT seq, status, run_id, finished_at::text FROM result WHERE job_id = %s", job
        )
        counters = self._rows(
            "SELECT num_total, num_succeeded, num_errored, num_expired, num_cancelled, output_uri, error_uri,"
            " status FROM batch_job WHERE job_id = %s",
            job,
        )[0]
        finished = self._rows(
            "SELECT coalesce(sum(num_finished), 0) FROM batch_metric WHERE job_id = %s", job
        )
        uris = [uri for uri in counters[5:7] if uri is not None]
        names = ("total", "succeeded", "errored", "expired", "cancelled")
        return JobRecord(
            job_id=job.job_id,
            has_ended=JobStatus(counters[7]).is_end,
            num_outputs=len(uris),
            items=job.items,
            requests=[RequestRow(seq, Item(uri, line, custom_id)) for seq, uri, line, custom_id in requests],
            results=[ResultRow(*row) for row in results],
            lines=[line for uri in uris for line in self._lines(uri)],
            counters=dict(zip(names, counters, strict=False)),
            snapshots=snapshots,
            admissions=_admissions(admissions_file, job.job_id),
            num_finished_in_windows=int(finished[0][0]),
        )

    def _lines(self, uri: str) -> list[ExportedLine]:
        content = self._wiring.objects.get(uri.removeprefix(self._wiring.objects.uri("")))
        parsed = [json.loads(line) for line in content.splitlines()]
        return [ExportedLine(line["id"], line["custom_id"]) for line in parsed]

    def _rows(self, query: str, job: Job, *values: object) -> list[tuple[Any, ...]]:
        try:
            if self._connection is None:
                self._connection = self._wiring.database.open_raw()
                self._connection.autocommit = True
            return self._connection.execute(query, (job.job_id, *values)).fetchall()
        except psycopg.Error:
            if self._connection is not None:
                self._connection.close()
            self._connection = None
            raise


def _admissions(path: Path, job_id: str) -> list[Admission]:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [Admission(entry["at_s"], entry["seqs"]) for entry in entries if entry["job_id"] == job_id]


def _chat_line(number: int, index: int, rng: random.Random) -> bytes:
    """A short prompt behind a shared beginning; answers of different lengths."""
    topic = " ".join(rng.choices(WORDS, k=8))
    shared = "Please read the report and answer the question. " * 2
    return json.dumps(
        {
            "custom_id": f"job{number}-{index}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": f"{shared}{topic}?"}],
                "max_tokens": rng.randint(8, 40),
                "temperature": 0,
            },
        }
    ).encode()
