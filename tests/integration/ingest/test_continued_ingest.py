"""An ingest of many objects that ends in its middle is continued: nothing is read twice or skipped."""

import json
from pathlib import Path

import pytest

from blend_core.errors import SourceError
from blend_core.tokenizing import Tokenizer
from flows.ingest.checkpoints import Checkpoints, kept_part
from flows.ingest.ingest import IngestCounts, ingest
from flows.ingest.parse import ParseOptions
from flows.ingest.sources import read_sources
from flows.job_spec import BatchJobSpec
from storage.database import Database
from storage.job_sources import JobSource, iter_used_ids, load_job_sources, save_job_sources
from storage.jobs import create_job, get_job
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.request_shard_writer import RequestShardWriter
from storage.request_shards import open_request_shards, request_index_key
from storage.requests import RequestWriter
from storage.results import counts, iter_results
from storage.runs import RunStatus, finish_run, start_run

pytestmark = [pytest.mark.postgres, pytest.mark.s3]

NUM_OBJECTS = 7
LINES_PER_OBJECT = 30


class _KilledError(Exception):
    pass


def line(number: int) -> str:
    if number % 10 == 7:
        return "{broken"
    # Every object repeats an id of the first one.
    name = 5 if number % LINES_PER_OBJECT == 5 else number
    body = {"messages": [{"role": "user", "content": f"Hi {number}"}]}
    return json.dumps(
        {"custom_id": f"r-{name}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    )


class Night:
    """A job over some objects, and runs of its ingest."""

    def __init__(self, db: Database, objects: ObjectStore, model_folder: Path) -> None:
        self.database, self.objects, self.tokenizer = db, objects, Tokenizer(model_folder)
        for index in range(NUM_OBJECTS):
            self.put(index, index * LINES_PER_OBJECT)
        self.spec = BatchJobSpec(s3=[objects.uri("in/")])
        self.job_id = create_job(db, name="t", model="tiny", spec=self.spec.model_dump(mode="json"))

    def put(self, index: int, first: int) -> None:
        lines = map(line, range(first, first + LINES_PER_OBJECT))
        self.objects.put(f"in/{index}.jsonl", "\n".join(lines).encode())

    def ingest(self, killed_after: int | None = None) -> IngestCounts:
        run = start_run(self.database, self.job_id, engine="none", policy="fcfs", details={}, lease_s=60)
        try:
            return self._ingest(run, killed_after)
        finally:
            finish_run(self.database, run, RunStatus.FAILED)

    def _ingest(self, run: Run, killed_after: int | None) -> IngestCounts:
        def on_progress(so_far: IngestCounts) -> None:
            if killed_after is not None and so_far.total >= killed_after:
                raise _KilledError

        listed = load_job_sources(self.database, self.job_id)
        sources = read_sources(self.spec, self.objects, {}, ParseOptions("tiny"), listed)
        if not listed:
            save_job_sources(self.database, self.job_id, run, sources.listed)
        kept = kept_part(sources.listed)
        rows = RequestWriter(self.database, self.job_id, run, num_kept=kept.num_items)
        shards = RequestShardWriter(
            self.objects,
            run,
            num_kept=kept.num_items,
            kept_index_key=request_index_key(self.database, self.job_id),
        )
        sources.start_at(kept.num_sources, Checkpoints(rows, shards, items_between=50).source_read)
        return ingest(
            sources,
            self.tokenizer,
            rows,
            shards,
            max_model_len=200,
            on_progress=on_progress,
            used_ids=iter_used_ids(self.database, self.job_id, kept.num_items),
        )

    def num_items(self) -> list[int | None]:
        return [source.num_items for source in load_job_sources(self.database, self.job_id)]

    def stored(self) -> list[tuple[object, ...]]:
        rows = iter_results(self.database, self.job_id)
        return [(row.seq, row.custom_id, row.source_uri, row.source_line, row.error_code) for row in rows]


@pytest.fixture
def night(db: Database, objects: ObjectStore, model_folder: Path) -> Night:
    return Night(db, objects, model_folder)


def test_what_was_stored_is_not_read_again_and_the_rest_is(
    night: Night, db: Database, objects: ObjectStore, model_folder: Path
) -> None:
    whole = night.ingest()
    assert night.num_items() == [LINES_PER_OBJECT] * NUM_OBJECTS

    again = Night(db, objects, model_folder)
    with pytest.raises(_KilledError):
        again.ingest(killed_after=150)
    assert again.num_items() == [LINES_PER_OBJECT] * 4 + [None] * 3
    assert counts(db, again.job_id).total == 4 * LINES_PER_OBJECT
    # Whoever reads the first one again, or lists anew, meets others.
    again.put(0, 9_000)
    again.put(NUM_OBJECTS, 9_000)
    with pytest.raises(_KilledError):
        again.ingest(killed_after=190)
    assert again.num_items() == [LINES_PER_OBJECT] * 6 + [None]

    end = again.ingest()
    assert (end.total, end.errored, end.num_prompt_tokens) == (
        whole.total, whole.errored, whole.num_prompt_tokens,
    )  # fmt: skip
    assert again.stored() == night.stored()
    assert sum(row[-1] == "duplicate_custom_id" for row in again.stored()) == NUM_OBJECTS - 1
    job = get_job(db, again.job_id)
    assert (job.num_total, job.num_errored) == (whole.total, whole.errored)
    with (
        open_request_shards(db, objects, night.job_id) as first,
        open_request_shards(db, objects, again.job_id) as second,
    ):
        assert len(second) == len(first)
        seqs = first.load_arrays().seq
        assert second.load_arrays().seq.tolist() == seqs.tolist()
        assert [second.body(seq) for seq in seqs] == [first.body(seq) for seq in seqs]


def test_an_object_that_changed_since_it_was_listed_is_refused(night: Night) -> None:
    with pytest.raises(_KilledError):
        night.ingest(killed_after=100)
    night.put(5, 9_000)
    with pytest.raises(SourceError, match=r"in/5\.jsonl changed"):
        night.ingest()


def test_a_query_is_asked_again_as_a_whole() -> None:
    objects = [JobSource("s3", f"s3://b/{index}", 1, "e", 10) for index in range(3)]
    queries = [JobSource("sql:1", "sql:1", num_items=5), JobSource("sql:2", "sql:2")]
    kept = kept_part([*objects, *queries])
    assert (kept.num_sources, kept.num_items) == (3, 30)


def test_a_list_of_25000_objects_is_rows_beside_the_job(night: Night, db: Database) -> None:
    run = start_run(db, night.job_id, engine="none", policy="fcfs", details={}, lease_s=60)
    sources = [
        JobSource("s3", f"s3://b/day/{index:06}.jsonl", index, f'"{index}"') for index in range(25_000)
    ]
    save_job_sources(db, night.job_id, run, sources)
    save_job_sources(db, night.job_id, run, sources)
    assert load_job_sources(db, night.job_id) == sources
    with RequestWriter(db, night.job_id, run) as rows:
        for index in range(25_000):
            rows.source_read(index, 1)
    assert {source.num_items for source in load_job_sources(db, night.job_id)} == {1}
