"""`blend run` and `blend submit`: a batch job from a file or from options."""

import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blend_core.errors import BlendError, ConfigurationError
from flows.cli.job_options import (
    S3,
    Connection,
    IdColumn,
    IdempotencyKey,
    JobFile,
    MaxTokens,
    Model,
    Name,
    Parquet,
    PolicyName,
    Prompt,
    Sql,
    System,
)
from flows.cli.output import Json, errors_about, print_json, print_line, tell

if TYPE_CHECKING:
    from flows.job_spec import BatchJobSpec
    from flows.running import JobOutcome

_FIRST_LINE_BYTES = 1 << 16


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
    job_id: Annotated[
        str | None, typer.Option("--job-id", metavar="JOB", help="Continue this job instead of creating one.")
    ] = None,
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
      blend run --s3 s3://bucket/requests/ --model smollm2-135m --policy dual_scan
      blend run --sql tickets.sql --prompt 'Summarise: {{ body }}'
      blend run --parquet s3://lake/tickets/ --prompt 'Summarise: {{ body }}' --id-column ticket_id
      blend run --job-id job_01m8kzrqrsafg01r9jwt --json
    """
    given = _given(s3, parquet, sql, prompt, system, id_column, connection, model, policy, max_tokens, name)
    if job_id is not None and (job_file is not None or given or idempotency_key is not None):
        raise ConfigurationError("--job-id continues a job as it is; leave out the job file and its options.")
    spec = None if job_id is not None else _job(job_file, given)

    import time

    from flows.cli.services import brought_up
    from flows.preflight import check_job
    from flows.progress import shown_progress
    from flows.running import create_job, run_job
    from flows.stopping import StopReason
    from storage.jobs import get_job

    ids = {} if job_id is None else {"job_id": job_id}
    with errors_about(ids), brought_up() as wiring:
        if spec is not None:
            check_job(wiring, spec)
            job_id = create_job(wiring, spec, idempotency_key)
        assert job_id is not None
        ids["job_id"] = job_id
        tell(f"job {job_id}")
        try:
            with shown_progress(sys.stderr, time.monotonic) as progress:
                reason = StopReason.CANCELLED if on_sigterm is OnSigterm.CANCEL else StopReason.INTERRUPTED
                outcome = run_job(wiring, job_id, progress, on_sigterm=reason)
        except Exception:
            with suppress(BlendError):
                ids["status"] = get_job(wiring.database, job_id).status.value
            raise
    _print_outcome(outcome, json=json)
    if outcome.status != "completed":
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
    idempotency_key: IdempotencyKey = None,
    json: Json = False,
) -> None:
    """Submit a batch job and return its id at once.

    The served deployment `ad-hoc` runs it: needs `blend up`. Follow the job with `blend status JOB` or on
    Prefect's pages. Settings are those of the environment of `blend up`, not of this command.

    \b
    Examples:
      blend submit night.yaml
      blend submit --s3 s3://bucket/requests/ --json
    """
    spec = _job(
        job_file,
        _given(s3, parquet, sql, prompt, system, id_column, connection, model, policy, max_tokens, name),
    )

    from flows.cli.services import connected
    from flows.cli.stack import prefect_ui_url
    from flows.deployments import submit_job

    with connected() as wiring:
        if wiring.settings.prefect_api_url is None:
            # Behind the Prefect server of somebody else there may be other models.
            wiring.models.resolve(spec.model)
        submitted = submit_job(wiring, spec, idempotency_key)
        ui_url = prefect_ui_url(wiring.endpoints.prefect_api_url)
    link = f"{ui_url}/runs/flow-run/{submitted.flow_run_id}"
    if json:
        print_json({"job_id": submitted.job_id, "flow_run_id": submitted.flow_run_id, "url": link})
    else:
        print_line(f"Submitted job {submitted.job_id}")
        print_line(f"Follow it with `blend status {submitted.job_id}` or at {link}")


def _given(
    s3: list[str] | None,
    parquet: str | None,
    sql: Path | None,
    prompt: str | None,
    system: str | None,
    id_column: str | None,
    connection: str | None,
    model: str | None,
    policy: str | None,
    max_tokens: int | None,
    name: str | None,
) -> dict[str, Any]:
    """The parts of a job that options gave, in the shape of a job file."""
    if sql is None and connection is not None:
        raise ConfigurationError("--connection belongs to a query; give it with --sql FILE.")
    if sql is None and parquet is None and not (prompt is system is id_column is None):
        raise ConfigurationError(
            "--prompt, --system and --id-column belong to rows; give --sql FILE or --parquet URI with them."
        )
    for address in [*(s3 or []), *([parquet] if parquet else [])]:
        if not address.startswith("s3://") and Path(address).exists():
            raise ConfigurationError(
                f"{address} is a file of this machine, and jobs read S3; put it there with "
                f"`blend upload {address}` and give the address that it prints."
            )
    given: dict[str, Any] = {"model": model, "name": name, "s3": s3}
    template = {"prompt": prompt, "system": system, "id_column": id_column}
    if (sql is not None or parquet is not None) and prompt is None:
        raise ConfigurationError("--sql and --parquet need --prompt, a template over their columns.")
    if parquet is not None:
        given["parquet"] = [_said({"uri": parquet, **template})]
    if sql is not None:
        given["sql"] = [_said({"query": _query(sql), "connection": connection, **template})]
    options = {"policy": policy, "default_max_tokens": max_tokens}
    given["options"] = _said(options) or None
    return {key: value for key, value in given.items() if value}


def _said(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _query(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The query file {path} cannot be read ({type(error).__name__}).") from None


def _job(job_file: Path | None, given: dict[str, Any]) -> "BatchJobSpec":
    """The job of a file with the options over it, or of the options alone."""
    from flows.job_spec import load_job_file, parse_job

    if job_file is None:
        return parse_job(given, origin="job from options")
    if _holds_requests(job_file):
        raise ConfigurationError(
            f"{job_file} looks like a request file, not a job file; put it into S3 with "
            f"`blend upload {job_file}` and run it with --s3 and the address that it prints."
        )
    spec = load_job_file(job_file)
    if not given:
        return spec
    content = spec.model_dump(mode="json", exclude_unset=True)
    options = content.get("options", {}) | given.get("options", {})
    return parse_job(content | given | ({"options": options} if options else {}), origin=str(job_file))


def _holds_requests(path: Path) -> bool:
    """Whether a file is request lines, by its name or by how it begins."""
    if path.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        return path.exists()
    try:
        with path.open("rb") as file:
            content = file.read(_FIRST_LINE_BYTES)
    except OSError:
        return False
    # Parquet, gzip or zstd: a job file is none of these.
    if content.startswith((b"PAR1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return True
    first = content.partition(b"\n")[0]
    return first.startswith(b"{") and (b'"custom_id"' in first or b'"body"' in first)


def _print_outcome(outcome: "JobOutcome", *, json: bool) -> None:
    if json:
        print_json(
            {
                "job_id": outcome.job_id,
                "status": outcome.status,
                "total": outcome.total,
                "succeeded": outcome.succeeded,
                "errored": outcome.errored,
                "expired": outcome.expired,
                "cancelled": outcome.cancelled,
                "duration_s": outcome.duration_s,
                "output_uris": list(outcome.output_uris),
                "error_uris": list(outcome.error_uris),
                "table_uris": list(outcome.table_uris),
            }
        )
        return
    print_line(
        f"Job {outcome.job_id} {outcome.status} in {outcome.duration_s:.1f} s: "
        f"{outcome.succeeded:,} succeeded + {outcome.errored:,} errored + {outcome.expired:,} expired "
        f"+ {outcome.cancelled:,} cancelled = {outcome.total:,}"
    )
    for uri in (*outcome.output_uris, *outcome.error_uris, *outcome.table_uris):
        print_line(f"  {uri}")
    print_line(f"See `blend report {outcome.job_id}` and `blend results {outcome.job_id}`.")
