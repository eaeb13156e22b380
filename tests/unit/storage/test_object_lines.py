import gzip
import io
from collections.abc import Generator, Iterator
from typing import Any, cast

import pyarrow as pa
import pytest
from botocore.exceptions import ClientError
from hypothesis import given, settings
from hypothesis import strategies as st
from urllib3.exceptions import ProtocolError

from blend_core.errors import SourceError, SourceUnavailableError
from storage.compression import plain_chunks
from storage.object_lines import read_chunks, split_lines


def lines_of(chunks: list[bytes], max_line_bytes: int = 100, start_line: int = 0) -> list[tuple[int, bytes]]:
    batches = split_lines(iter(chunks), max_line_bytes=max_line_bytes, start_line=start_line)
    return [pair for batch in batches for pair in enumerate(batch.lines, batch.first_line)]


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(1, 50), st.integers(0, 20))
def test_lines_are_those_of_the_whole_text_however_it_is_cut(data: bytes, size: int, start_line: int) -> None:
    whole = data.split(b"\n")
    if whole[-1] == b"":
        whole.pop()
    expected = [(number, line) for number, line in enumerate(whole, 1) if number > start_line]
    assert lines_of(cut(data, size), 1_000, start_line) == expected


@settings(deadline=None)
@given(st.lists(st.binary(max_size=30), max_size=10), st.integers(1, 40), st.integers(1, 20))
def test_an_overlong_line_is_cut_and_its_neighbours_are_whole(
    parts: list[bytes], size: int, limit: int
) -> None:
    whole = [part.replace(b"\n", b"") for part in parts]
    data = b"".join(line + b"\n" for line in whole)
    expected = [(number, line[: limit + 1]) for number, line in enumerate(whole, 1)]
    assert lines_of(cut(data, size), limit) == expected


def test_gzip_is_told_by_content_and_members_may_follow_one_another() -> None:
    data = gzip.compress(b"a\nb\n") + gzip.compress(b"c\n" * 1000)
    for size in (1, 7, 10_000):
        assert b"".join(plain_chunks(iter(cut(data, size)), "s3://b/k")) == b"a\nb\n" + b"c\n" * 1000


def test_zero_bytes_behind_gzip_are_no_damage() -> None:
    data = gzip.compress(b"a\nb\n") + bytes(30) + gzip.compress(b"c\n") + bytes(500)
    for size in (1, 7, 64, 10_000):
        assert b"".join(plain_chunks(iter(cut(data, size)), "s3://b/k")) == b"a\nb\nc\n"
    with pytest.raises(SourceError, match="damaged gzip"):
        list(plain_chunks(iter([gzip.compress(b"a") + b"\0rest"]), "s3://b/k"))


def test_zstd_is_told_by_content_and_frames_may_follow_one_another() -> None:
    zstd = pa.Codec("zstd")
    data = zstd.compress(b"a\nb\n", asbytes=True) + zstd.compress(b"c\n" * 1000, asbytes=True)
    for size in (1, 7, 10_000):
        assert b"".join(plain_chunks(iter(cut(data, size)), "s3://b/k")) == b"a\nb\n" + b"c\n" * 1000
    with pytest.raises(SourceError, match="zstd that is damaged or ends too early"):
        list(plain_chunks(iter([data[:-3]]), "s3://b/k"))
    much = zstd.compress(b"\0" * (20 << 20), asbytes=True)
    assert max(map(len, plain_chunks(iter([much]), "s3://b/k"))) <= 1 << 20


def test_an_error_of_the_connection_within_zstd_is_its_own() -> None:
    def broken() -> Iterator[bytes]:
        yield pa.Codec("zstd").compress(b"a" * 1_000, asbytes=True)[:10]
        raise SourceUnavailableError("It broke off.")

    with pytest.raises(SourceUnavailableError, match="It broke off"):
        list(plain_chunks(broken(), "s3://b/k"))


def test_a_compressed_parquet_file_is_no_request_lines() -> None:
    with pytest.raises(SourceError, match="compressed Parquet"):
        list(plain_chunks(iter([gzip.compress(b"PAR1....")]), "s3://b/k"))


def test_a_small_gzip_of_much_text_comes_in_bounded_chunks() -> None:
    data = gzip.compress(b"\0" * (20 << 20))
    assert max(map(len, plain_chunks(iter([data]), "s3://b/k"))) <= 1 << 20


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_gzip_is_an_error_of_the_source(damage: str) -> None:
    data = gzip.compress(bytes(range(256)) * 100)
    data = data[:-10] if damage == "cut" else data[:40] + b"\xff\xff\xff" + data[43:]
    with pytest.raises(SourceError, match="upload it again"):
        list(plain_chunks(iter([data]), "s3://b/k"))


class BreakingServer:
    """An object that a connection may lose after some bytes; heeds ranges unless told not to."""

    def __init__(self, data: bytes, breaks: list[int], heeds_range: bool = True) -> None:
        self.data, self.breaks, self.heeds_range, self.etag = data, breaks, heeds_range, '"1"'
        self.num_calls = self.num_closed = 0

    def get_object(self, **arguments: str) -> dict[str, Any]:
        self.num_calls += 1
        if arguments.get("IfMatch", self.etag) != self.etag:
            raise ClientError({"Error": {"Code": "PreconditionFailed"}}, "GetObject")
        start = (
            int(arguments["Range"].removeprefix("bytes=").removesuffix("-")) if "Range" in arguments else 0
        )
        response: dict[str, Any] = {"ETag": self.etag}
        if start and self.heeds_range:
            response["ContentRange"] = f"bytes {start}-"
        else:
            start = 0
        response["ContentLength"] = len(self.data) - start
        response["Body"] = self._body(start, self.breaks.pop(0) if self.breaks else len(self.data))
        return response

    def _body(self, start: int, num_bytes: int) -> Any:
        data = self.data[start : start + num_bytes]
        breaks_off = start + num_bytes < len(self.data)
        server = self

        class Body:
            def close(self) -> None:
                server.num_closed += 1

            def iter_chunks(self, size: int) -> Iterator[bytes]:
                stream = io.BytesIO(data)
                while chunk := stream.read(3):
                    yield chunk
                if breaks_off:
                    raise ProtocolError("reset")

        return Body()


@pytest.mark.parametrize("heeds_range", [True, False])
def test_a_broken_connection_is_resumed_at_its_byte(heeds_range: bool) -> None:
    data = bytes(range(100))
    breaks = [10, 25, 0, 40] if heeds_range else [10, 30, 0, 70]
    server = BreakingServer(data, breaks, heeds_range)
    assert b"".join(read_chunks(server, "b", "k", None, sleep=lambda s: None)) == data
    assert server.num_calls == server.num_closed == 5


def test_a_body_that_nobody_reads_to_its_end_is_closed() -> None:
    server = BreakingServer(bytes(100), [])
    chunks = read_chunks(server, "b", "k", None)
    next(iter(chunks))
    assert server.num_closed == 0
    cast(Generator[bytes], chunks).close()
    assert server.num_closed == 1


def test_a_server_that_never_gets_further_is_given_up() -> None:
    server = BreakingServer(bytes(100), [10] + [0] * 50)
    with pytest.raises(SourceUnavailableError):
        list(read_chunks(server, "b", "k", None, sleep=lambda s: None))
    assert server.num_calls < 10


def test_an_object_that_changes_between_two_connections_is_an_error() -> None:
    server = BreakingServer(bytes(100), [10])

    def change(seconds: float) -> None:
        server.etag = '"2"'

    with pytest.raises(SourceError, match="changed while it was read"):
        list(read_chunks(server, "b", "k", None, sleep=change))


def test_an_object_other_than_the_listed_one_is_an_error() -> None:
    with pytest.raises(SourceError, match="changed while it was read"):
        list(read_chunks(BreakingServer(b"x", []), "b", "k", '"0"', sleep=lambda s: None))
