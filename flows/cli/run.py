"""`blend run` and `blend submit`: a batch job from a file or from options."""

import sys
from contextlib import suppress
from datetime import UTC
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from blend_core.errors import BlendError, ConfigurationError
from flows.cli.job_options import (
    S3,
    Connection,
    IdColumn,
    IdempotencyKey,
    JobFile,
    JobId,
    LogicalDate,
    MaxTokens,
    Model,
    Name,
    Parquet,
    PolicyName,
    Prompt,
    Sql,
    System,
    given_fields,
    logical_day,
    new_job,
)
from flows.cli.output import Json, errors_about, print_json, print_line, tell

if TYPE_CHECKING:
    from flows.job_outcome import JobOutcome
    from storage.jobs import Job


class OnSigterm(StrEnum):
    """What SIGTERM does to the job of `blend run`."""

    INTERRUPT = "interrupt"
    CANCEL = "cancel"


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(run)
    app.command()(submit)


def run(
    job_file: JobFile = None,
    s3: S3 = None,
    parquet: Parquet = None,
    sql: Sql = None,
    prompt: Prompt = None,
    system: System = None,
    id_column: IdColumn = None,
    connection: Connection = None,
    model: Model = None,
    policy: PolicyName = None,
    max_tokens: MaxTokens = None,
    name: Name = None,
    logical_date: LogicalDate = None,
    job_id: JobId = None,
    idempotency_key: IdempotencyKey = None,
    on_sigterm: Annotated[
        OnSigterm,
        typer.Option(
            help="SIGTERM leaves the job to be continued (interrupt), or cancels it as Ctrl-C does and "
            "exports what has finished (cancel)."
        ),
    ] = OnSigterm.INTERRUPT,
    json: Json = False,
) -> None:
    """Run a batch job here, to its end.

    Starts the embedded services where needed; works with Prefect down. A job that was stopped is continued
    with --job-id: what has a result is never run twice. Ctrl-C cancels the job and keeps what has finished;
    SIGTERM does what --on-sigterm says, and a second signal ends everything at once. This is the call for
    cron or Airflow: exit status 0 when the job is completed (error rows included), 1 when it failed, expired
    or was cancelled, 2 for wrong usage or configuration.

    \b
    Examples:
      blend upload requests.jsonl && blend run --s3 s3://blend/uploads/requests.jsonl
      blend run night.yaml --json
      blend run night.yaml --idempotency-key "night $(date +%F)" --json
      blend run night.yaml --logical-date 2026-11-28
      blend run --s3 s3://bucket/requests/ --model smollm2-135m --policy dual_scan
      blend run --sql tickets.sql --prompt 'Summarise: {{ body }}'
      blend run --parquet s3://lake/tickets/ --prompt 'Summarise: {{ body }}' --id-column ticket_id
      blend run --job-id job_01m8kzrqrsafg01r9jwt --json
    """
    given = given_fields(
        s3, parquet, sql, prompt, system, id_column, connection, model, policy, max_tokens, name
    )
    spec = new_job(job_id, job_file, given, idempotency_key, logical_date)
    day = logical_day(logical_date)

    import time

    from flows.cli.services import brought_up
    from flows.dates import local_date, utc_now
    from flows.job_spec import dated
    from flows.preflight import check_job
    from flows.progress import shown_progress
    from flows.running import create_job, run_job
    from flows.stopping import StopReason, stop_at_signals, told_when_stopped
    from storage.jobs import get_job

    ids = {} if job_id is None else {"job_id": job_id}
    with errors_about(ids), brought_up() as wiring:
        if spec is not None:
            check_job(wiring, dated(spec, day or local_date(utc_now(), wiring.settings.nightly.timezone)))
            job_id = create_job(wiring, spec, idempotency_key, logical_date=day)
        assert job_id is not None
        ids["job_id"] = job_id
        tell(f"job {job_id}")
        try:
            ended_before = _told_end(get_job(wiring.database, job_id))
            reason = StopReason.CANCELLED if on_sigterm is OnSigterm.CANCEL else StopReason.INTERRUPTED

            def told(why: StopReason) -> None:
                is_cancelled = why is StopReason.CANCELLED
                progress.note(_stop_text(ids["job_id"], on_sigterm, is_cancelled=is_cancelled))

            with (
                shown_progress(sys.stderr, time.monotonic) as progress,
                stop_at_signals(reason, ends_process=True) as stop,
                told_when_stopped(stop, told),
            ):
                outcome = run_job(wiring, job_id, progress, stop)
        except Exception:
            with suppress(BlendError):
                ids["status"] = get_job(wiring.database, job_id).status.value
            raise
    _print_outcome(outcome, ended_before=ended_before, json=json)
    if outcome.status != "completed" or outcome.write_back_error is not None:
        raise typer.Exit(1)


def submit(
    job_file: JobFile = None,
    s3: S3 = None,
    parquet: Parquet = None,
    sql: Sql = None,
    prompt: Prompt = None,
    system: System = None,
    id_column: IdColumn = None,
    connection: Connection = None,
    model: Model = None,
    policy: PolicyName = None,
    max_tokens: MaxTokens = None,
    name: Name = None,
    logical_date: LogicalDate = None,
    job_id: JobId = None,
    idempotency_key: IdempotencyKey = None,
    json: Json = False,
) -> None:
    """Submit a batch job and return its id at once.

    The served deployment `ad-hoc` runs it: needs `blend up`. Follow the job with `blend status JOB` or on
    Prefect's pages. Settings are those of the environment of `blend up` and of the file blend.env, not of
    this command. A job whose vLLM options do not fit its model or its LoRA adapters is refused as by `blend
    run`; VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is for this command, too. A job that was stopped is continued with
    --job-id.

    \b
    Examples:
      blend submit night.yaml
      blend submit --s3 s3://bucket/requests/ --json
      blend submit --job-id job_01m8kzrqrsafg01r9jwt
    """
    given = given_fields(
        s3, parquet, sql, prompt, system, id_column, connection, model, policy, max_tokens, name
    )
    spec = new_job(job_id, job_file, given, idempotency_key, logical_date)
    day = logical_day(logical_date)

    from flows.cli.services import connected
    from flows.cli.stack import prefect_ui_url
    from flows.deployments import resubmit_job, submit_job
    from flows.preflight import check_submitted
    from storage.jobs import get_job, job_of_key

    with connected() as wiring:
        if spec is not None and wiring.settings.prefect_api_url is None:
            # Behind the Prefect server of somebody else there may be other models and folders.
            check_submitted(wiring, spec)
        if job_id is not None:
            job = get_job(wiring.database, job_id)
            if job.finished_at is not None:
                raise ConfigurationError(
                    f"{_ended_before(job)} and has nothing left to run; submit a new job.", job_id=job_id
                )
            is_new = False
            submitted = resubmit_job(wiring, job_id)
        else:
            assert spec is not None
            is_new = idempotency_key is None or job_of_key(wiring.database, idempotency_key) is None
            submitted = submit_job(wiring, spec, idempotency_key, logical_date=day)
        ui_url = prefect_ui_url(wiring.endpoints.prefect_api_url)
    link = f"{ui_url}/runs/flow-run/{submitted.flow_run_id}"
    if json:
        print_json(
            {
                "job_id": submitted.job_id,
                "flow_run_id": submitted.flow_run_id,
                "url": link,
                "is_new": is_new,
            }
        )
    else:
        if is_new or idempotency_key is None:
            print_line(f"Submitted job {submitted.job_id}")
        else:
            print_line(f"Job {submitted.job_id} was there already, made with this idempotency key.")
        print_line(f"Follow it with `blend status {submitted.job_id}` or at {link}")


def _stop_text(job_id: str, on_sigterm: OnSigterm, *, is_cancelled: bool) -> str:
    """What the first signal does to the job."""
    if is_cancelled:
        kept = "" if on_sigterm is OnSigterm.CANCEL else " SIGTERM would have left it to be continued."
        what = f"Cancelling job {job_id}: what has finished is exported, the rest is not run.{kept}"
    else:
        what = f"Stopping the run of job {job_id}, which is left to be continued."
    return f"{what} A second signal ends everything at once."


def _told_end(job: "Job") -> bool:
    """Whether a job has ended, so that there is nothing to run; tells it."""
    if job.finished_at is None:
        return False
    tell(f"{_ended_before(job)}: nothing is run. For another run of its requests make a new job.")
    return True


def _ended_before(job: "Job") -> str:
    assert job.finished_at is not None, "asked of jobs that have ended"
    at = job.finished_at.astimezone(UTC)
    return f"Job {job.job_id} had ended before, {job.status} at {at:%Y-%m-%d %H:%M:%S} UTC"


def _print_outcome(outcome: "JobOutcome", *, ended_before: bool, json: bool) -> None:
    if json:
        print_json(
            {
                "job_id": outcome.job_id,
                "status": outcome.status,
                "had_ended_before": ended_before,
                "total": outcome.total,
                "succeeded": outcome.succeeded,
                "errored": outcome.errored,
                "expired": outcome.expired,
                "cancelled": outcome.cancelled,
                "duration_s": outcome.duration_s,
                "output_uris": list(outcome.output_uris),
                "error_uris": list(outcome.error_uris),
                "table_uris": list(outcome.table_uris),
                "error_message": outcome.error_message,
                "write_back_error": outcome.write_back_error,
            }
        )
        return
    how = (
        f"had ended before, {outcome.status}"
        if ended_before
        else f"{outcome.status} in {outcome.duration_s:.1f} s"
    )
    print_line(
        f"Job {outcome.job_id} {how}: "
        f"{outcome.succeeded:,} succeeded + {outcome.errored:,} errored + {outcome.expired:,} expired "
        f"+ {outcome.cancelled:,} cancelled = {outcome.total:,}"
    )
    if outcome.error_message is not None:
        print_line(outcome.error_message)
    for uri in (*outcome.output_uris, *outcome.error_uris, *outcome.table_uris):
        print_line(f"  {uri}")
    if outcome.write_back_error is not None:
        print_line(f"Not every result was written back: {outcome.write_back_error}")
        print_line(f"`blend write-back {outcome.job_id}` does it again.")
    print_line(f"See `blend report {outcome.job_id}` and `blend results {outcome.job_id}`.")
