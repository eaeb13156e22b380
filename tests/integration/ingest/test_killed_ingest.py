"""An ingest that is killed in its middle is done anew: nothing is lost and nothing is there twice."""

import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from blend_core.tokenizing import Tokenizer
from flows.ingest.ingest import ingest
from flows.ingest.parse import ParseOptions
from flows.ingest.sources import read_sources
from flows.job_spec import BatchJobSpec
from storage.database import Database
from storage.jobs import create_job, get_job
from storage.object_client import ObjectStoreOptions
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.request_shard_writer import RequestShardWriter
from storage.request_shards import open_request_shards
from storage.requests import RequestWriter
from storage.results import counts, iter_results, pending_seqs

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]

NUM_LINES = 12_000
NUM_BAD = NUM_LINES // 100

# Reads all lines, says so, and waits to be killed before it may complete.
INGEST_HALF = """
import json, sys
from pathlib import Path
from blend_core.tokenizing import Tokenizer
from flows.ingest.ingest import ingest
from flows.ingest.parse import ParseOptions
from flows.ingest.sources import read_sources
from flows.job_spec import BatchJobSpec
from storage.database import Database
from storage.object_client import ObjectStoreOptions
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.request_shard_writer import RequestShardWriter
from storage.requests import RequestWriter

given = json.loads(sys.stdin.readline())
objects = ObjectStore(ObjectStoreOptions(**given["store"]))
spec = BatchJobSpec(**given["spec"])

def stall(counts):
    if counts.total == given["num_lines"]:
        print("read", flush=True)
        sys.stdin.readline()

ingest(
    read_sources(spec, objects, {}, ParseOptions("tiny")),
    Tokenizer(Path(given["model_folder"])),
    RequestWriter(Database(given["database_url"]), given["job_id"]),
    RequestShardWriter(objects, Run("run_dead", given["job_id"], 1), max_shard_bytes=500_000),
    max_model_len=200,
    on_progress=stall,
)
"""


def line(number: int) -> str:
    if number % 100 == 7:
        return "{broken"
    body = {"messages": [{"role": "user", "content": f"Hi {number}"}], "max_tokens": 5}
    return json.dumps(
        {"custom_id": f"r-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    )


def test_an_ingest_that_was_killed_loses_and_doubles_nothing(
    db: Database, objects: ObjectStore, object_store_options: ObjectStoreOptions, model_folder: Path
) -> None:
    source = objects.put("in.jsonl", "\n".join(map(line, range(NUM_LINES))).encode())
    spec = BatchJobSpec(name="t", model="tiny", s3=[source.uri])
    job_id = create_job(db, name="t", model="tiny", spec=spec.model_dump(mode="json"))
    given = {
        "store": asdict(replace(object_store_options, bucket=source.uri.split("/")[2])),
        "spec": spec.model_dump(mode="json"),
        "model_folder": str(model_folder),
        "database_url": db.url,
        "job_id": job_id,
        "num_lines": NUM_LINES,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", INGEST_HALF], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(given) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "read\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert 0 < counts(db, job_id).total < NUM_LINES
    assert get_job(db, job_id).ingested_at is None
    assert len(objects.keys(f"jobs/{job_id}/requests/")) > 1

    again = ingest(
        read_sources(spec, objects, {}, ParseOptions("tiny")),
        Tokenizer(model_folder),
        RequestWriter(db, job_id),
        RequestShardWriter(objects, Run("run_next", job_id, 2)),
        max_model_len=200,
    )
    assert (again.total, again.errored) == (NUM_LINES, NUM_BAD)
    rows = list(iter_results(db, job_id))
    assert [row.seq for row in rows] == list(range(NUM_LINES))
    assert [row.source_line for row in rows] == list(range(1, NUM_LINES + 1))
    assert {row.seq for row in rows if row.status == "errored"} == set(range(7, NUM_LINES, 100))
    assert (counts(db, job_id).total, counts(db, job_id).errored) == (NUM_LINES, NUM_BAD)
    good = [number for number in range(NUM_LINES) if number % 100 != 7]
    assert pending_seqs(db, job_id).tolist() == good
    with open_request_shards(db, objects, job_id) as shards:
        assert shards.load_arrays().seq.tolist() == good
