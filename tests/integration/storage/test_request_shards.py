import tempfile
from pathlib import Path

import numpy as np
import pytest

from blend_core.errors import ObjectGoneError, StorageError
from blend_core.request import Request, SamplingParams
from storage.database import Database
from storage.jobs import create_job
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.request_shard_writer import RequestShardWriter
from storage.request_shards import RequestShards, open_request_shards
from storage.shard_format import arrow_bytes

pytestmark = [pytest.mark.postgres, pytest.mark.s3]


def request_of(seq: int) -> Request:
    tokens = np.arange(seq % 7 + 1, dtype=np.int32) + seq
    sampling = SamplingParams(
        max_tokens=10 + seq,
        min_tokens=seq % 3,
        temperature=0.5,
        top_p=0.9,
        top_k=seq % 2,
        seed=None if seq % 2 else 2**62 + seq,
        stop=("\n", "half \ud800") if seq % 5 == 0 else (),
        ignore_eos=seq % 3 == 0,
    )
    return Request(seq, tokens, sampling)


def same(a: Request, b: Request) -> bool:
    return (
        a.seq == b.seq and a.sampling == b.sampling and np.array_equal(a.prompt_token_ids, b.prompt_token_ids)
    )


SEQS = [seq for seq in range(300) if seq % 11]


def run_of(job_id: str, number: int = 1) -> Run:
    return Run(f"run_{number}", job_id, number)


def read(objects: ObjectStore, writer: RequestShardWriter, **changes: int) -> RequestShards:
    assert writer.index_key is not None
    return RequestShards(objects, "job_a", writer.index_key, **changes)


@pytest.fixture
def written(objects: ObjectStore) -> RequestShardWriter:
    with RequestShardWriter(objects, run_of("job_a"), max_shard_bytes=4_000) as writer:
        indices = [writer.add(request_of(seq), f"body {seq}".encode()) for seq in SEQS]
    assert indices == sorted(indices)
    assert indices[-1] > 3
    return writer


def test_requests_come_back_as_they_were_in_any_order(
    objects: ObjectStore, written: RequestShardWriter
) -> None:
    wanted = [299, 1, 150, 1, 298]
    with read(objects, written) as reader:
        assert len(reader) == len(SEQS)
        fetched = reader.fetch(wanted)
        assert all(same(request, request_of(seq)) for request, seq in zip(fetched, wanted, strict=True))
        assert not fetched[0].prompt_token_ids.flags.writeable
        assert reader.body(150) == b"body 150"


def test_a_small_cache_gives_the_same_requests(objects: ObjectStore, written: RequestShardWriter) -> None:
    with read(objects, written, max_cached_bytes=1) as reader:
        for seq in (299, 1, 150, 299):
            assert same(reader.fetch([seq])[0], request_of(seq))


def test_a_shard_that_is_gone_says_how_to_end_its_job(
    objects: ObjectStore, written: RequestShardWriter
) -> None:
    told = r"is gone, and its job .* `blend cancel` ends the job"
    with read(objects, written) as reader:
        objects.delete(objects.keys("jobs/job_a/"))
        with pytest.raises(ObjectGoneError, match=told):
            reader.fetch([1])
    with pytest.raises(ObjectGoneError, match=told):
        read(objects, written)


def test_what_is_downloaded_lies_in_no_folder_that_a_kill_could_leave(
    objects: ObjectStore, written: RequestShardWriter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with read(objects, written) as reader:
        assert same(reader.fetch([299])[0], request_of(299))
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert list(tmp_path.iterdir()) == []


def test_arrays_of_all_requests_and_of_pending_ones(
    objects: ObjectStore, written: RequestShardWriter
) -> None:
    with read(objects, written) as reader:
        everything = reader.load_arrays()
        some = reader.load_arrays(np.array([298, 5, 160, 11], dtype=np.int64))
        none = reader.load_arrays(np.array([], dtype=np.int64))
    assert everything.seq.tolist() == SEQS
    for row, seq in enumerate(SEQS):
        prompt = everything.token_ids[everything.offsets[row] : everything.offsets[row + 1]]
        assert np.array_equal(prompt, request_of(seq).prompt_token_ids)
    assert everything.max_tokens.tolist() == [10 + seq for seq in SEQS]
    assert some.seq.tolist() == [5, 160, 298]
    assert some.min_tokens.tolist() == [2, 1, 1]
    assert some.num_prompt_tokens.tolist() == [6, 7, 5]
    assert (len(none), none.offsets.tolist()) == (0, [0])


def test_an_unknown_seq_is_named(objects: ObjectStore, written: RequestShardWriter) -> None:
    with read(objects, written) as reader:
        for seq in (11, 300, -1):
            with pytest.raises(StorageError, match=f"request {seq};"):
                reader.fetch([seq])


def test_a_later_run_replaces_what_an_earlier_one_left(
    objects: ObjectStore, written: RequestShardWriter
) -> None:
    with RequestShardWriter(objects, run_of("job_a", 2)) as writer:
        writer.add(request_of(5), b"")
    assert objects.keys("jobs/job_a/") == ["jobs/job_a/requests/000002-run_2/00000.arrow", writer.index_key]
    with read(objects, writer) as reader:
        assert reader.load_arrays().seq.tolist() == [5]


def test_what_a_stale_run_writes_late_takes_the_place_of_nothing(objects: ObjectStore) -> None:
    stale = RequestShardWriter(objects, run_of("job_a", 1), max_shard_bytes=1)
    with stale:
        stale.add(request_of(1), b"early")
        with RequestShardWriter(objects, run_of("job_a", 2), max_shard_bytes=1) as newer:
            newer.add(request_of(1), b"newer")
            newer.add(request_of(2), b"newer")
        stale.add(request_of(2), b"late")
    # It even begins once more, as a process does that slept between the check of its run and this.
    with RequestShardWriter(objects, run_of("job_a", 1), max_shard_bytes=1) as again:
        again.add(request_of(1), b"late")

    with read(objects, newer) as reader:
        assert (reader.body(1), reader.body(2)) == (b"newer", b"newer")


def test_a_checkpoint_is_kept_by_the_next_run_under_the_keys_that_it_has(objects: ObjectStore) -> None:
    first = RequestShardWriter(objects, run_of("job_a", 1), max_shard_bytes=1)
    first.__enter__()
    first.add(request_of(0), b"kept")
    first.checkpoint()
    first_checkpoint = first.index_key
    first.add(request_of(1), b"lost")
    second = RequestShardWriter(
        objects, run_of("job_a", 2), num_kept=1, kept_index_key=first_checkpoint, max_shard_bytes=1
    )
    with second:
        second.add(request_of(1), b"again")
    # The first one goes on as if nothing had happened.
    first.add(request_of(2), b"late")
    first.checkpoint()

    with read(objects, second) as reader:
        assert (reader.body(0), reader.body(1)) == (b"kept", b"again")
    assert second.num_prompt_tokens == sum(request_of(seq).num_prompt_tokens for seq in (0, 1))


def test_an_ingest_without_requests_and_one_that_did_not_end(db: Database, objects: ObjectStore) -> None:
    with RequestShardWriter(objects, run_of("empty")) as writer:
        pass
    with read(objects, writer) as reader:
        assert len(reader.load_arrays()) == 0
    job_id = create_job(db, name="never ended", model="tiny", spec={})
    with pytest.raises(StorageError, match="not been read to its end"):
        open_request_shards(db, objects, job_id)


def test_shards_from_before_keys_named_runs_are_still_read(
    objects: ObjectStore, written: RequestShardWriter
) -> None:
    assert written.index_key is not None
    index = objects.read_arrow(written.index_key)
    for number, key in enumerate(index.column("key").to_pylist()):
        objects.put(f"jobs/job_a/requests/{number:05}.arrow", objects.get(key))
    objects.put("jobs/job_a/requests/index.arrow", arrow_bytes(index.drop_columns(["key"])))

    with RequestShards(objects, "job_a", "jobs/job_a/requests/index.arrow") as reader:
        assert reader.body(150) == b"body 150"


def test_requests_must_ascend(objects: ObjectStore) -> None:
    with RequestShardWriter(objects, run_of("job_b")) as writer:
        writer.add(request_of(5), b"")
        with pytest.raises(StorageError, match="ascending"):
            writer.add(request_of(5), b"")
