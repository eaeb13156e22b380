"""Serves the flow to Prefect: `ad-hoc` for runs from its pages, `nightly` on a schedule.

    python -m flows.deployments

`blend up` starts this with the services in its environment. Flow runs are processes of their own that it
starts one at a time, since they share one device.
"""

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date

import httpx
from prefect import serve
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.schedules import Cron
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.types.entrypoint import EntrypointType

from blend_core.errors import BlendError, ConfigurationError, ServiceError, StorageError
from flows.job_spec import BatchJobSpec, parse_job
from flows.nights import check_schedule, night_job, register, serving_home
from flows.prefect_queue import AD_HOC
from flows.preflight import check_queries
from flows.run_batch import NightlySchedule, run_batch
from flows.running import create_job
from flows.settings import NightlySettings, load_settings
from flows.wiring import Endpoints, Wiring
from storage.job_status import JobStatus
from storage.jobs import get_job, set_job_status
from storage.nights import forget_nightlies

NIGHTLY = "nightly"
_CONNECTION_TAG = "connection:"
_TARGET_TAG = "target:"
_NOT_HANDED_OVER = "Prefect did not answer when the job was handed over; submit it again."

_AD_HOC = """\
Runs one batch job, now or at a time that you choose: **Run**, then fill in the form.

- **S3 addresses** or **SQL queries**: at least one of them. `blend upload FILE` puts a file of yours into S3.
- A query names its database by **Connection**; the tags `connection:…` of this page are those it may name.
- Progress and the report are under **Artifacts** of the run. **Cancel** there ends the job and keeps its
  answers; **Retry** continues a run that failed.
"""
_NO_NIGHTLY_JOB = (
    "Not scheduled: set BLEND_NIGHTLY__JOB to a job file (YAML), and BLEND_NIGHTLY__CRON and "
    "BLEND_NIGHTLY__TIMEZONE to when it runs, then restart with `blend down` and `blend up`."
)


def build_deployments(
    nightly: NightlySettings,
    connections: Collection[str] = ("platform",),
    targets: Collection[str] = (),
) -> list[RunnerDeployment]:
    """Both deployments; without a nightly job its schedule is there and inactive.

    Args:
        nightly: what the schedule runs.
        connections: names that SQL sources may use here; tags tell them to whoever submits.
        targets: names that `write_back` may use here, told in the same way.

    Raises:
        ConfigurationError: the job file, the cron expression or the time zone is wrong, the job has no name,
            or the schedule fires more than once a day.
    """
    ad_hoc = run_batch.to_deployment(
        AD_HOC,
        description=_AD_HOC,
        tags=[f"{_CONNECTION_TAG}{name.lower()}" for name in sorted(connections)]
        + [f"{_TARGET_TAG}{name.lower()}" for name in sorted(targets)],
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    job = _nightly_job(nightly)
    try:
        schedule = Cron(nightly.cron, timezone=nightly.timezone, active=job is not None)
        scheduled = run_batch.to_deployment(
            NIGHTLY,
            schedule=schedule,
            parameters=None
            if job is None
            else {
                "job": job.model_dump(mode="json"),
                "schedule": NightlySchedule(cron=nightly.cron, timezone=nightly.timezone).model_dump(),
            },
            description=_NO_NIGHTLY_JOB if job is None else _nightly_description(nightly),
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
    except ValueError as error:
        raise ConfigurationError(
            f"BLEND_NIGHTLY__CRON {nightly.cron!r} in time zone {nightly.timezone!r} is no schedule; "
            "give five cron fields, and a zone such as Europe/Berlin in BLEND_NIGHTLY__TIMEZONE."
        ) from error
    check_schedule(nightly.cron, nightly.timezone)
    assert isinstance(ad_hoc, RunnerDeployment)
    assert isinstance(scheduled, RunnerDeployment), "called outside of an event loop"
    return [ad_hoc, scheduled]


def _nightly_description(nightly: NightlySettings) -> str:
    return (
        f"Runs the job file `{nightly.job}` by the cron expression `{nightly.cron}` in the time zone "
        f"{nightly.timezone}; times on this page are in your browser's.\n\n"
        "The switch beside the schedule pauses and resumes it; **Run** runs the night of today, or of the "
        "logical date that you give, unless its job is there already."
    )


def _nightly_job(nightly: NightlySettings) -> BatchJobSpec | None:
    if nightly.job is None:
        return None
    return night_job(nightly.job)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job on its way.

    Attributes:
        job_id: the job; `blend status` knows it already.
        flow_run_id: the flow run that will run it.
    """

    job_id: str
    flow_run_id: str


def submit_job(
    wiring: Wiring,
    spec: BatchJobSpec,
    idempotency_key: str | None = None,
    *,
    logical_date: date | None = None,
) -> Submitted:
    """Writes a job down and hands it to the served deployment `ad-hoc`.

    The same `idempotency_key` again returns the same job and the same flow run, and starts nothing.
    `logical_date` is the day that the job is about; by default today in the configured time zone.

    Raises:
        ConfigurationError: the serving process does not know a connection of the job, or a query or template
            of the job is wrong; no job is made.
        ServiceError: Prefect does not answer, or the deployment is not served.
        StorageError: the job cannot be written down.
    """
    with _ad_hoc_deployment(wiring) as (client, deployment):
        _check_queries(spec, deployment.tags)
        # Written down first, so that the job shows in `blend status` while it waits for its turn.
        job_id = create_job(wiring, spec, idempotency_key, logical_date=logical_date)
        try:
            return _hand_over(client, deployment, spec, job_id, idempotency_key=job_id)
        except httpx.HTTPError:
            if idempotency_key is None:
                # A job that has a key is handed over by the next try. Should Prefect have taken this one
                # nevertheless, its run finds an ended job and leaves it, or runs the job and keeps it.
                with suppress(StorageError):
                    set_job_status(wiring.database, job_id, JobStatus.FAILED, error_message=_NOT_HANDED_OVER)
            raise


def resubmit_job(wiring: Wiring, job_id: str) -> Submitted:
    """Hands a job whose run stopped to the served deployment `ad-hoc` again, which continues it.

    A job that has ended stays as it is; the flow run shows its report.

    Raises:
        ServiceError: Prefect does not answer, or the deployment is not served.
        StorageError: there is no such job.
    """
    job = get_job(wiring.database, job_id)
    spec = parse_job(job.spec, origin=f"Job {job_id}")
    with _ad_hoc_deployment(wiring) as (client, deployment):
        return _hand_over(client, deployment, spec, job_id, idempotency_key=None)


@contextmanager
def _ad_hoc_deployment(wiring: Wiring) -> Iterator[tuple[SyncPrefectClient, DeploymentResponse]]:
    """A client of Prefect and the deployment there; failures of the block to reach Prefect become
    `ServiceError`."""
    url = wiring.endpoints.prefect_api_url
    if url is None:
        raise ServiceError(
            "There is no Prefect server to submit to; start it with `blend up`, or use `blend run`."
        )
    try:
        with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
            yield client, client.read_deployment_by_name(f"{run_batch.name}/{AD_HOC}")
    except ObjectNotFound:
        raise ServiceError(f"Nothing serves the deployment {AD_HOC!r}; start it with `blend up`.") from None
    except httpx.HTTPError as error:
        raise ServiceError(
            f"Prefect at {url} did not answer ({type(error).__name__}); start it with `blend up`, "
            "or use `blend run`."
        ) from error


def _hand_over(
    client: SyncPrefectClient,
    deployment: DeploymentResponse,
    spec: BatchJobSpec,
    job_id: str,
    *,
    idempotency_key: str | None,
) -> Submitted:
    parameters = {"job": spec.model_dump(mode="json"), "job_id": job_id}
    created = client.create_flow_run_from_deployment(
        deployment.id, parameters=parameters, name=spec.name, idempotency_key=idempotency_key
    )
    return Submitted(job_id=job_id, flow_run_id=str(created.id))


def _check_queries(spec: BatchJobSpec, tags: list[str]) -> None:
    """Checks the job's queries against the connections that the serving process has told of."""
    known = {tag.removeprefix(_CONNECTION_TAG) for tag in tags if tag.startswith(_CONNECTION_TAG)}
    known |= {name.upper() for name in known}
    unknown = [source.connection for source in spec.sql if source.connection not in known]
    if unknown:
        name = unknown[0]
        raise ConfigurationError(
            f"The process that runs submitted jobs does not know the connection {name!r}: set "
            f"BLEND_SOURCES__{name.upper()} in the environment of `blend up` and run `blend up` again, which "
            "restarts that process."
        )
    target = None if spec.write_back is None else spec.write_back.connection
    if target is not None and f"{_TARGET_TAG}{target.lower()}" not in tags:
        raise ConfigurationError(
            f"The process that runs submitted jobs does not know the connection {target!r} to write back to: "
            f"set BLEND_TARGETS__{target.upper()} in the environment of `blend up` and run `blend up` again, "
            "which restarts that process."
        )
    check_queries(spec, {source.connection: "" for source in spec.sql})


def _register_nightly(wiring: Wiring) -> None:
    """Writes down what is scheduled here from now on, so that `blend status` can tell its missed nights."""
    nightly = wiring.settings.nightly
    job = _nightly_job(nightly)
    try:
        if job is not None:
            register(wiring, job, nightly.cron, nightly.timezone)
        home = serving_home(wiring.settings)
        forget_nightlies(wiring.database, home, but=None if job is None else job.name)
    except StorageError as error:
        # Serving needs no tables, and each night says anew that it is served.
        sys.stderr.write(f"blend: missed nights cannot be told yet: {error}\n")
    finally:
        wiring.close()


def main() -> None:
    """Serves until the process is ended."""
    try:
        settings = load_settings()
        # Flow runs are started with this environment; without a database they could do nothing but fail.
        endpoints = Endpoints.from_settings(settings)
        deployments = build_deployments(settings.nightly, {"platform", *settings.sources}, settings.targets)
        _register_nightly(Wiring.from_settings(settings, endpoints))
    except BlendError as error:
        sys.exit(f"blend: {error}")
    # What the stages log through the standard library belongs to the flow run's log, too.
    os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "flows,storage,blend_core")
    serve(*deployments, limit=1, print_starting_message=False)


if __name__ == "__main__":
    main()
