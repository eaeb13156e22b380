"""A folder of more objects than a page of a listing holds is one source, read and written down whole."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from flows.ingest.sources import list_sources
from flows.job_spec import BatchJobSpec
from storage.database import Database
from storage.job_sources import load_job_sources, save_job_sources
from storage.jobs import create_job
from storage.objects import ObjectStore
from storage.runs import start_run

pytestmark = [pytest.mark.postgres, pytest.mark.s3]

NUM_OBJECTS = 2_050
"""Two full pages and a third one."""


def test_every_object_of_a_listing_of_several_pages_is_written_down(
    db: Database, objects: ObjectStore
) -> None:
    keys = [f"many/{number:05}.jsonl" for number in range(NUM_OBJECTS)]
    with ThreadPoolExecutor(8) as pool:
        put = {entry.uri: entry for entry in pool.map(lambda key: objects.put(key, key.encode()), keys)}
    objects.put("many-more.jsonl", b"not of the folder")
    spec = BatchJobSpec(s3=[objects.uri("many/")])
    job_id = create_job(db, name="many", model="tiny", spec=spec.model_dump(mode="json"))
    run = start_run(db, job_id, engine="none", policy="fcfs", details={}, lease_s=60)

    save_job_sources(db, job_id, run, list_sources(spec, objects))

    listed = load_job_sources(db, job_id)
    assert [source.uri for source in listed] == [objects.uri(key) for key in keys]
    assert all(source.etag == put[source.uri].etag for source in listed)
    assert {source.size_bytes for source in listed} == {len(keys[0])}
