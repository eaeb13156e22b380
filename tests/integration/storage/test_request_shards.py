import tempfile
from pathlib import Path

import numpy as np
import pytest

from blend_core.errors import StorageError
from blend_core.request import Request, SamplingParams
from storage.objects import ObjectStore
from storage.request_shards import RequestShards, RequestShardWriter

pytestmark = pytest.mark.s3


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


@pytest.fixture
def shards(objects: ObjectStore) -> ObjectStore:
    with RequestShardWriter(objects, "job_a", max_shard_bytes=4_000) as writer:
        indices = [writer.add(request_of(seq), f"body {seq}".encode()) for seq in SEQS]
    assert indices == sorted(indices)
    assert indices[-1] > 3
    return objects


def test_requests_come_back_as_they_were_in_any_order(shards: ObjectStore) -> None:
    wanted = [299, 1, 150, 1, 298]
    with RequestShards(shards, "job_a") as reader:
        assert len(reader) == len(SEQS)
        fetched = reader.fetch(wanted)
        assert all(same(request, request_of(seq)) for request, seq in zip(fetched, wanted, strict=True))
        assert not fetched[0].prompt_token_ids.flags.writeable
        assert reader.body(150) == b"body 150"


def test_a_small_cache_gives_the_same_requests(shards: ObjectStore) -> None:
    with RequestShards(shards, "job_a", max_cached_bytes=1) as reader:
        for seq in (299, 1, 150, 299):
            assert same(reader.fetch([seq])[0], request_of(seq))


def test_what_is_downloaded_lies_in_no_folder_that_a_kill_could_leave(
    shards: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with RequestShards(shards, "job_a") as reader:
        assert same(reader.fetch([299])[0], request_of(299))
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert list(tmp_path.iterdir()) == []


def test_arrays_of_all_requests_and_of_pending_ones(shards: ObjectStore) -> None:
    with RequestShards(shards, "job_a") as reader:
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


def test_an_unknown_seq_is_named(shards: ObjectStore) -> None:
    with RequestShards(shards, "job_a") as reader:
        for seq in (11, 300, -1):
            with pytest.raises(StorageError, match=f"request {seq};"):
                reader.fetch([seq])


def test_a_second_ingest_replaces_what_the_first_one_left(shards: ObjectStore) -> None:
    with RequestShardWriter(shards, "job_a") as writer:
        writer.add(request_of(5), b"")
    assert shards.keys("jobs/job_a/") == [
        "jobs/job_a/requests/00000.arrow",
        "jobs/job_a/requests/index.arrow",
    ]
    with RequestShards(shards, "job_a") as reader:
        assert reader.load_arrays().seq.tolist() == [5]


def test_an_ingest_without_requests_and_one_that_did_not_end(objects: ObjectStore) -> None:
    with RequestShardWriter(objects, "empty"):
        pass
    with RequestShards(objects, "empty") as reader:
        assert len(reader.load_arrays()) == 0
    with pytest.raises(StorageError, match="no object"):
        RequestShards(objects, "never ended")


def test_requests_must_ascend(objects: ObjectStore) -> None:
    with RequestShardWriter(objects, "job_b") as writer:
        writer.add(request_of(5), b"")
        with pytest.raises(StorageError, match="ascending"):
            writer.add(request_of(5), b"")
