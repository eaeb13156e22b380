"""A run of a job that has been read, and its plan dealt to two ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.job_spec import BatchJobSpec
from flows.progress import SilentProgress
from flows.running import create_job
from flows.settings import EngineSettings, Settings
from flows.stages.context import JobContext, run_in_threads
from flows.stages.replan import Replanner
from flows.stages.shared_plan import SharedPlan
from flows.stopping import StopSignal
from flows.wiring import Endpoints, Wiring
from storage.database import Database
from storage.object_client import ObjectStoreOptions
from storage.recorder import Recorder
from storage.requests import RequestRow, RequestWriter
from storage.runs import start_run
from tests.integration.flows.two_ranks import NO_SHARDS, NUM_REQUESTS, Seconds, plan_of


@pytest.fixture
def context(db: Database, object_store_options: ObjectStoreOptions, tmp_path: Path) -> Iterator[JobContext]:
    """A run of a job that has been read."""
    endpoints = Endpoints(
        database_url=db.url,
        s3_endpoint_url=object_store_options.endpoint_url,
        s3_bucket=object_store_options.bucket,
        s3_access_key=object_store_options.access_key,
        s3_secret_key=object_store_options.secret_key,
        s3_region=object_store_options.region,
    )
    engine = EngineSettings(restart_delay_s=0.01)
    wiring = Wiring.from_settings(Settings(home=tmp_path, engine=engine), endpoints)
    spec = BatchJobSpec.model_validate({"name": "n", "s3": ["s3://b/k"]})
    job_id = create_job(wiring, spec)
    with RequestWriter(db, job_id) as writer:
        for seq in range(NUM_REQUESTS):
            writer.add(RequestRow(seq, "s3://b/k", seq + 1, num_prompt_tokens=20, max_tokens=10))
    run = start_run(db, job_id, engine="none", policy="fcfs", details={}, lease_s=60)
    yield JobContext(wiring, spec, run, StopSignal(), SilentProgress(), run_in_threads)
    wiring.close()


@pytest.fixture
def recorder(context: JobContext) -> Iterator[Recorder]:
    """One that commits when it is told to, as with a database that is slow."""
    wiring = context.wiring
    with Recorder(wiring.database, wiring.objects, context.run, flush_interval_s=600) as recorder:
        yield recorder


@pytest.fixture
def clock() -> Seconds:
    return Seconds()


@pytest.fixture
def shared(context: JobContext, recorder: Recorder, clock: Seconds) -> Iterator[SharedPlan]:
    """The plan, dealt to two ranks."""
    plan = plan_of(NUM_REQUESTS)
    with Replanner(context, NO_SHARDS, plan, plan) as replanner:
        yield SharedPlan(context, recorder, replanner, plan, plan, num_ranks=2, clock=clock)
