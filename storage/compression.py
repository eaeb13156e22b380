"""Plain bytes of compressed content, gzip or zstd, told by how it begins."""

import zlib
from collections.abc import Iterator
from io import RawIOBase
from itertools import chain

import pyarrow as pa

from blend_core.errors import SourceError

CHUNK_BYTES = 1 << 20
PARQUET_MAGIC = b"PAR1"
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MAGIC_BYTES = 4


def begin_of(chunks: Iterator[bytes]) -> bytes:
    """Takes chunks until they tell what kind of content they are; empty where there is none."""
    first = next(chunks, b"")
    while len(first) < _MAGIC_BYTES and (more := next(chunks, b"")):
        first += more
    return first


def plain_chunks(chunks: Iterator[bytes], uri: str) -> Iterator[bytes]:
    """The chunks as they are, or decompressed where the content begins as gzip or zstd does.

    Members or frames may follow one another, and zero bytes the last gzip member. A chunk has at most
    `CHUNK_BYTES`, however small the file that it came from: some hold gigabytes of one letter.

    Raises:
        SourceError: the compressed content is damaged, cut off, or a Parquet file.
    """
    first = begin_of(chunks)
    if first.startswith(_GZIP_MAGIC):
        yield from _text_only(_gunzipped(first, chunks, uri), uri)
    elif first.startswith(_ZSTD_MAGIC):
        yield from _text_only(_unzstd(first, chunks, uri), uri)
    else:
        if first:
            yield first
        yield from chunks


def _text_only(plain: Iterator[bytes], uri: str) -> Iterator[bytes]:
    first = begin_of(plain)
    if first.startswith(PARQUET_MAGIC):
        raise SourceError(
            f"{uri} is a compressed Parquet file, which cannot be read in parts; upload it unpacked "
            "(Parquet compresses its own columns).",
            uri=uri,
        )
    if first:
        yield first
    yield from plain


def _gunzipped(first: bytes, chunks: Iterator[bytes], uri: str) -> Iterator[bytes]:
    decompressor = zlib.decompressobj(wbits=31)
    chunk = first
    try:
        while chunk:
            plain = decompressor.decompress(chunk, CHUNK_BYTES)
            if plain:
                yield plain
            chunk = decompressor.unconsumed_tail
            if decompressor.eof:
                chunk = decompressor.unused_data
                # A tape or a disk block may fill what follows the last member with zeros.
                while not (chunk := chunk.lstrip(b"\0")) and (more := next(chunks, b"")):
                    chunk = more
                if chunk:
                    decompressor = zlib.decompressobj(wbits=31)
            elif not chunk:
                chunk = next(chunks, b"")
        plain = decompressor.flush()
    except zlib.error as error:
        raise SourceError(f"{uri} is damaged gzip; upload it again.", uri=uri) from error
    if plain:
        yield plain
    if not decompressor.eof:
        raise SourceError(f"{uri} is gzip that ends too early; upload it again.", uri=uri)


class _ChunkFile(RawIOBase):
    """The chunks as the file object that Arrow's decompressor reads from."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        super().__init__()
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes; none at the end."""
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return b""
            self._rest = chunk
        taken = self._rest if size < 0 else self._rest[:size]
        self._rest = self._rest[len(taken) :]
        return taken


def _unzstd(first: bytes, chunks: Iterator[bytes], uri: str) -> Iterator[bytes]:
    source = pa.PythonFile(_ChunkFile(chain([first], chunks)), mode="r")
    try:
        with pa.CompressedInputStream(source, "zstd") as stream:
            while plain := stream.read(CHUNK_BYTES):
                yield plain
    except OSError as error:
        raise SourceError(
            f"{uri} is zstd that is damaged or ends too early; upload it again.", uri=uri
        ) from error
