"""Runs the demo's job, as a Prefect flow where there is a Prefect, and tells what came of it."""

import multiprocessing
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from blend_core.errors import ServiceError
from blend_core.specs import load_device_profile
from flows.demo import DEMO_MODEL, DemoSize, prepare_demo
from flows.following import follow_job
from flows.job_spec import BatchJobSpec
from flows.progress import Progress
from flows.report import JobReport, build_report
from flows.running import create_job, run_job
from flows.tables import text_table
from flows.wiring import Endpoints, Wiring

WHAT_IF_DEVICE = "a100-80g"
KILL_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """What the demo did.

    Attributes:
        report: the job's report.
        duration_s: wall time from the job's creation to its end.
        num_s3: requests and bad lines from S3.
        num_postgres: rows from Postgres.
        as_flow: whether it ran as a Prefect flow.
    """

    report: JobReport
    duration_s: float
    num_s3: int
    num_postgres: int
    as_flow: bool

    def as_json(self, database_url: str) -> dict[str, Any]:
        """Plain data for `--json`; `database_url` is the read-only one."""
        counts, metrics = self.report.counts, self.report.metrics
        return {
            "job_id": self.report.job_id,
            "status": self.report.status,
            "total": counts.total,
            "succeeded": counts.succeeded,
            "errored": counts.errored,
            "expired": counts.expired,
            "cancelled": counts.cancelled,
            "duration_s": self.duration_s,
            "tokens_per_s": metrics.tokens_per_s,
            "num_batches": metrics.num_batches,
            "sources": {"s3": self.num_s3, "postgres": self.num_postgres},
            "prefix_sharing": {
                "planned": self.report.planned_sharing,
                "measured": metrics.prefix_sharing,
                "best": self.report.best_sharing,
            },
            "database_url": database_url,
        }


def run_demo(wiring: Wiring, progress: Progress, size: DemoSize) -> DemoOutcome:
    """Prepares the demo's data, runs its job to the end and reads its report.

    Raises:
        BlendError: the job could not be run.
    """
    progress.stage_started("prepare", f"model {DEMO_MODEL}, request file, table of tickets")
    wiring.models.add(DEMO_MODEL)
    spec = prepare_demo(wiring.database, wiring.objects, size)
    progress.stage_finished("prepare", f"model {DEMO_MODEL}, request file, table of tickets")
    started_s = time.monotonic()
    job_id = create_job(wiring, spec)
    as_flow = wiring.endpoints.prefect_api_url is not None
    if as_flow:
        as_flow = _run_as_flow(wiring, spec, job_id, progress)
    if not as_flow:
        run_job(wiring, job_id, progress)
    duration_s = time.monotonic() - started_s
    report = build_report(
        wiring.database, job_id, wiring.model_spec(spec), load_device_profile(WHAT_IF_DEVICE)
    )
    num_s3, num_postgres = _source_counts(wiring, job_id)
    return DemoOutcome(report, duration_s, num_s3, num_postgres, as_flow)


def _run_as_flow(wiring: Wiring, spec: BatchJobSpec, job_id: str, progress: Progress) -> bool:
    """Runs the Prefect flow in a process of its own and follows it; False where it ended before the job."""
    log = (wiring.settings.home / "logs" / "demo.log").absolute()
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = service_environment(wiring.endpoints, wiring.settings.home)
    child = multiprocessing.get_context("spawn").Process(
        target=_flow_process, args=(spec.model_dump(mode="json"), job_id, environment, log), daemon=False
    )
    child.start()
    try:
        status = follow_job(wiring.database, job_id, progress, child.is_alive)
        child.join(KILL_AFTER_S)
    except KeyboardInterrupt:
        # The terminal has sent the signal to the child as well: it cancels the job and exports what is done.
        child.join()
        raise
    finally:
        if child.is_alive():
            child.terminate()
            child.join(KILL_AFTER_S)
        if child.is_alive():
            child.kill()
    if not status.is_end:
        progress.note(f"The Prefect flow ended early (see {log}); going on without Prefect.")
    return status.is_end


def _flow_process(spec: dict[str, Any], job_id: str, environment: Mapping[str, str], log: Path) -> None:
    """Entry of the child: everything that it and its own children print goes to the log."""
    os.environ.update(environment)
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    from flows.run_batch import run_batch

    run_batch(BatchJobSpec.model_validate(spec), job_id=job_id)


def service_environment(endpoints: Endpoints, home: Path) -> dict[str, str]:
    """The services as environment variables, for a process that reads its settings from there."""
    values = {
        "BLEND_HOME": str(home.absolute()),
        "BLEND_DATABASE__URL": endpoints.database_url,
        "BLEND_DATABASE__READ_ONLY_URL": endpoints.read_only_database_url,
        "BLEND_OBJECT_STORE__ENDPOINT_URL": endpoints.s3_endpoint_url,
        "BLEND_OBJECT_STORE__BUCKET": endpoints.s3_bucket,
        "BLEND_OBJECT_STORE__ACCESS_KEY": endpoints.s3_access_key,
        "BLEND_OBJECT_STORE__SECRET_KEY": endpoints.s3_secret_key,
        "BLEND_OBJECT_STORE__REGION": endpoints.s3_region,
        "PREFECT_API_URL": endpoints.prefect_api_url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    return {name: value for name, value in values.items() if value is not None}


DEMO_QUERIES: tuple[tuple[str, str], ...] = (
    (
        "What became of the requests, by kind?",
        """
SELECT split_part(custom_id, '-', 1) AS kind, count(*) AS requests,
       round(avg(num_prompt_tokens)) AS prompt_tokens, round(avg(num_cached_tokens)) AS from_cache,
       round(avg(num_output_tokens)) AS output_tokens
FROM request_result WHERE job_id = %(job_id)s AND status = 'succeeded'
GROUP BY 1 ORDER BY 1
""",
    ),
    (
        "Which lines were bad, and why?",
        """
SELECT source_line AS line, custom_id, error_code, error
FROM request_result WHERE job_id = %(job_id)s AND status = 'errored' ORDER BY source_line
""",
    ),
    (
        "What did the model write about the tickets of the Postgres table?",
        """
SELECT t.id AS ticket, left(t.body, 40) AS body, left(title.text, 34) AS title, left(reply.text, 44) AS reply
FROM demo_ticket t
JOIN request_result title ON title.custom_id = 'title-' || t.id AND title.job_id = %(job_id)s
JOIN request_result reply ON reply.custom_id = 'reply-' || t.id AND reply.job_id = %(job_id)s
ORDER BY t.id LIMIT 4
""",
    ),
)


def run_query(url: str, query: str, job_id: str) -> str:
    """Runs one of the queries through the read-only login and returns its rows as a table.

    Raises:
        ServiceError: the database refused or did not answer.
    """
    try:
        with psycopg.connect(url) as connection:
            cursor = connection.execute(query.encode(), {"job_id": job_id})
            headers = [column.name for column in cursor.description or ()]
            return text_table(headers, cursor.fetchall())
    except psycopg.Error as error:
        raise ServiceError(
            f"The read-only login could not run a query ({type(error).__name__}); run `blend up` again."
        ) from None


def _source_counts(wiring: Wiring, job_id: str) -> tuple[int, int]:
    statement = """
        SELECT count(*) FILTER (WHERE source_uri LIKE 's3://%%'),
               count(*) FILTER (WHERE source_uri NOT LIKE 's3://%%')
        FROM request WHERE job_id = %(job_id)s
    """
    with wiring.database.raw() as connection:
        row = connection.execute(statement, {"job_id": job_id}).fetchone()
    assert row is not None
    return int(row[0]), int(row[1])
