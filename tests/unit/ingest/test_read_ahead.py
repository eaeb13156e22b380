import threading

import pytest

from blend_core.errors import SourceError
from flows.ingest.read_ahead import NUM_AHEAD, NUM_AT_ONCE, SMALL_BYTES, read_ahead
from storage.job_sources import JobSource


def small(number: int) -> JobSource:
    return JobSource("s3", f"s3://b/{number:03}", 10, "e")


def test_objects_come_in_their_order_whatever_is_fetched_first() -> None:
    second_is_there = threading.Event()

    def read(source: JobSource) -> bytes:
        if source.uri.endswith("000"):
            assert second_is_there.wait(30)
        else:
            second_is_there.set()
        return source.uri.encode()

    sources = [small(number) for number in range(100)]

    found = list(read_ahead(sources, read))

    assert found == [(source, source.uri.encode()) for source in sources]


def test_only_small_objects_are_read_ahead() -> None:
    large = JobSource("s3", "s3://b/large", SMALL_BYTES + 1, "e")
    query = JobSource("sql:1", "sql:1")

    found = list(read_ahead([small(0), large, query], lambda source: b"content"))

    assert [content for _, content in found] == [b"content", None, None]


def test_no_more_is_fetched_than_there_is_room_for_and_a_reader_that_leaves_ends_it() -> None:
    fetched: list[str] = []

    def read(source: JobSource) -> bytes:
        fetched.append(source.uri)
        return b""

    reading = read_ahead([small(number) for number in range(500)], read)
    next(reading)
    reading.close()

    assert len(fetched) <= NUM_AHEAD
    assert not any(thread.name.startswith("read-ahead") for thread in threading.enumerate())
    assert NUM_AT_ONCE < NUM_AHEAD


def test_an_object_that_cannot_be_read_is_told_in_its_turn() -> None:
    def read(source: JobSource) -> bytes:
        if source.uri.endswith("001"):
            raise SourceError("It changed.")
        return b"x"

    reading = read_ahead([small(0), small(1)], read)

    assert next(reading) == (small(0), b"x")
    with pytest.raises(SourceError, match="changed"):
        next(reading)
