import gzip
import os
from dataclasses import replace
from pathlib import Path

import pytest

from blend_core.errors import (
    ConfigurationError,
    ObjectGoneError,
    SourceError,
    SourceUnavailableError,
    StorageError,
    StorageUnavailableError,
)
from storage.object_client import ObjectStoreOptions
from storage.objects import ObjectStore

pytestmark = pytest.mark.s3


def test_what_was_put_is_read_back_whole_and_in_parts(any_objects: ObjectStore, tmp_path: Path) -> None:
    entry = any_objects.put("a/b.bin", b"0123456789")
    assert (entry.uri, entry.size_bytes) == (any_objects.uri("a/b.bin"), 10)
    assert any_objects.get("a/b.bin") == b"0123456789"
    assert any_objects.get_range("a/b.bin", 3, 4) == b"3456"
    assert any_objects.get_range("a/b.bin", 8, 2) == b"89"
    any_objects.download("a/b.bin", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"0123456789"
    assert any_objects.put("c", tmp_path / "copy").size_bytes == 10


def test_a_full_disk_is_told_and_the_download_works_once_there_is_room(
    any_objects: ObjectStore, tmp_path: Path
) -> None:
    any_objects.put("a/b.bin", b"x" * 100_000)
    (tmp_path / "copy.part").symlink_to("/dev/full")
    with pytest.raises(StorageUnavailableError, match=r"b\.bin \(No space left on device\); make room there"):
        any_objects.download("a/b.bin", tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []
    any_objects.download("a/b.bin", tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_size == 100_000


def test_a_listing_goes_beyond_a_thousand_keys_and_is_sorted(any_objects: ObjectStore) -> None:
    names = [f"many/{number:05}.jsonl" for number in range(1_005)]
    for name in reversed(names):
        any_objects.put(name, b"x")
    entries = any_objects.list(any_objects.uri("many/"))
    assert [entry.uri for entry in entries] == [any_objects.uri(name) for name in names]
    assert {entry.size_bytes for entry in entries} == {1}
    any_objects.delete(any_objects.keys("many/"))
    assert any_objects.keys("many/") == []


def test_empty_objects_that_mark_a_folder_are_no_sources(moto_options: ObjectStoreOptions) -> None:
    store = ObjectStore(moto_options)
    store.ensure_bucket()
    store.put("marked/", b"")
    store.put("marked/a", b"x")
    assert [entry.uri for entry in store.list(store.uri("marked/"))] == [store.uri("marked/a")]


def test_an_address_is_a_key_a_folder_or_a_pattern(any_objects: ObjectStore) -> None:
    for key in ("day", "day-2", "days/x"):
        any_objects.put(key, b"x")

    def listed(address: str) -> list[str]:
        return [entry.uri.removeprefix(any_objects.uri("")) for entry in any_objects.list(address)]

    assert listed(any_objects.uri("day")) == ["day"]
    assert listed(any_objects.uri("days/")) == ["days/x"]
    assert listed(any_objects.uri("day*")) == ["day", "day-2", "days/x"]
    assert listed(any_objects.uri("")) == ["day", "day-2", "days/x"]


def test_a_key_that_is_not_there_is_no_prefix(any_objects: ObjectStore) -> None:
    for key in ("day-1", "day-2", "day-3", "day-4", "folder/x"):
        any_objects.put(key, b"x")
    with pytest.raises(
        SourceError, match=r"begin so: day-1, day-2, day-3, …; name one, or write s3://.*/day\*"
    ):
        any_objects.list(any_objects.uri("day"))
    with pytest.raises(SourceError, match=r"begin so: folder/x; name one, or write s3://.*/folder/ for all"):
        any_objects.list(any_objects.uri("folder"))
    with pytest.raises(SourceError, match="for all of the bucket"):
        any_objects.list(any_objects.uri("").removesuffix("/"))


def test_lines_of_plain_and_gzip_objects_are_numbered_from_one(any_objects: ObjectStore) -> None:
    text = b"first\n\nthird\r\nlast"
    for key, data in (("plain", text), ("packed", gzip.compress(text))):
        any_objects.put(key, data)
        (entry,) = any_objects.list(any_objects.uri(key))
        lines = list(any_objects.iter_lines(entry, max_line_bytes=100))
        assert lines == [(1, b"first"), (2, b""), (3, b"third\r"), (4, b"last")]
        assert list(any_objects.iter_lines(entry.uri, max_line_bytes=100, start_line=2)) == lines[2:]


def test_an_object_that_was_replaced_after_the_listing_is_refused(any_objects: ObjectStore) -> None:
    any_objects.put("k", b"old\n")
    (entry,) = any_objects.list(any_objects.uri("k"))
    any_objects.put("k", b"new\n")
    with pytest.raises(SourceError, match="changed while it was read"):
        list(any_objects.iter_lines(entry, max_line_bytes=100))


@pytest.mark.parametrize("read", ["lines", "whole", "opened"])
def test_an_object_that_was_deleted_after_it_was_listed_is_told_so(
    any_objects: ObjectStore, read: str
) -> None:
    any_objects.put("k", b"a line\n")
    (entry,) = any_objects.list(any_objects.uri("k"))
    any_objects.delete(["k"])
    reading = {
        "lines": lambda: list(any_objects.iter_lines(entry, max_line_bytes=100)),
        "whole": lambda: any_objects.read_source(entry),
        "opened": lambda: any_objects.open_source(entry, max_line_bytes=100),
    }[read]
    with pytest.raises(SourceError, match="was deleted after it was listed; put it back") as caught:
        reading()
    assert not caught.value.retryable


def test_an_upload_of_several_parts_is_whole(any_objects: ObjectStore) -> None:
    piece = os.urandom(1 << 20)
    with any_objects.uploader("big") as upload:
        for _ in range(35):
            upload.write(piece)
    assert upload.num_bytes == 35 << 20
    assert any_objects.get("big") == piece * 35


def test_an_upload_that_fails_leaves_nothing(any_objects: ObjectStore) -> None:
    for num_pieces in (1, 20):
        upload = any_objects.uploader("half")
        for _ in range(num_pieces):
            upload.write(bytes(1 << 20))
        upload.__exit__(RuntimeError, RuntimeError("stop"), None)
        assert any_objects.keys("half") == []


def test_a_key_that_may_not_be_deleted_is_told(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**arguments: object) -> dict[str, object]:
        return {"Errors": [{"Key": "kept", "Code": "AccessDenied", "Message": "retention"}]}

    monkeypatch.setattr(objects._client, "delete_objects", refuse)
    with pytest.raises(StorageError, match=f"Access to {objects.uri('kept')} is denied"):
        objects.delete(["gone", "kept"])


def test_missing_things_are_named(any_objects: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no object at or under"):
        any_objects.list(any_objects.uri("nothing/"))
    with pytest.raises(SourceError, match="bucket of s3://no-such-bucket/x does not exist"):
        any_objects.list("s3://no-such-bucket/x")
    with pytest.raises(SourceError, match="a name that S3 does not allow"):
        any_objects.list("s3://no such bucket/x")
    with pytest.raises(SourceError, match="There is no object"):
        list(any_objects.iter_lines(any_objects.uri("nothing"), max_line_bytes=10))
    with pytest.raises(ObjectGoneError, match="nothing is gone; put it back"):
        any_objects.get("nothing")
    with pytest.raises(ObjectGoneError, match="nothing is gone; put it back"):
        any_objects.download("nothing", tmp_path / "copy")
    with pytest.raises(SourceError, match="write s3://bucket/key"):
        any_objects.list("file:///etc/passwd")


def test_wrong_credentials_are_told_without_the_secret(object_store_options: ObjectStoreOptions) -> None:
    store = ObjectStore(replace(object_store_options, secret_key="not-the-secret"))
    with pytest.raises(SourceError, match="BLEND_OBJECT_STORE__SECRET_KEY") as caught:
        store.list(store.uri("x"))
    assert "not-the-secret" not in str(caught.value)
    assert "not-the-secret" not in repr(replace(object_store_options, secret_key="not-the-secret"))


def test_a_name_that_the_embedded_server_takes_is_read_back_and_any_other_told(
    objects: ObjectStore, tmp_path: Path
) -> None:
    file = tmp_path / "p%20q.jsonl"
    file.write_bytes(b"x")
    for name in ("100%.jsonl", "a%b?c#d.jsonl"):
        objects.put(name, b"x")
        assert (objects.get(name), len(objects.list(objects.uri(name)))) == (b"x", 1)
    for call in (
        lambda: objects.put("p%20q.jsonl", b"x"),
        lambda: objects.put("p%20q.jsonl", file),
        lambda: objects.get("p%20q.jsonl"),
        lambda: objects.list(objects.uri("p%20q.jsonl")),
    ):
        with pytest.raises((StorageError, SourceError), match=r"takes no %20 in a name, so rename it"):
            call()


def test_an_endpoint_that_is_not_there_may_be_tried_again(
    object_store_options: ObjectStoreOptions, closed_port: int
) -> None:
    store = ObjectStore(replace(object_store_options, endpoint_url=f"http://127.0.0.1:{closed_port}"))
    with pytest.raises(SourceUnavailableError, match="did not answer"):
        store.list(store.uri("x"))
    with pytest.raises(StorageUnavailableError, match="did not answer"):
        store.get("x")
    with pytest.raises(ConfigurationError, match="no URL"):
        ObjectStore(replace(object_store_options, endpoint_url="localhost"))
