"""Bytes and lines of an object: resumed where a connection broke, bounded in memory."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from blend_core.errors import SourceUnavailableError
from storage.compression import CHUNK_BYTES
from storage.object_errors import (
    CLIENT_ERRORS,
    changed_error,
    error_code,
    gone_error,
    is_missing,
    is_transient,
    source_error,
)

_MAX_TRIES_WITHOUT_PROGRESS = 6
_FIRST_DELAY_S = 0.2


@dataclass(frozen=True, slots=True)
class LineBatch:
    """Consecutive lines of an object.

    Attributes:
        first_line: number of `lines[0]`, from 1.
        lines: without `\\n` (a `\\r` stays), blank ones included. A line over the limit is cut to
            `max_line_bytes + 1` bytes: its length tells.
    """

    first_line: int
    lines: list[bytes]


def read_chunks(
    client: Any,
    bucket: str,
    key: str,
    etag: str | None,
    *,
    start: int = 0,
    end: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[bytes]:
    """The object's bytes in chunks, every one exactly once; with `end` only those from `start` up to it.

    A broken connection is resumed at its byte. The version is held by ETag, asked for and compared, since not
    every server heeds `If-Match`; the length is compared with what the server promised.

    Raises:
        SourceError: there is no such object, it may not be read, or it changed.
        SourceUnavailableError: it did not answer, several times without a byte of progress.
    """
    uri = f"s3://{bucket}/{key}"
    offset, stop, num_tries, delay_s = start, end, 0, _FIRST_DELAY_S
    while stop is None or offset < stop:
        try:
            arguments = {"Bucket": bucket, "Key": key}
            if offset or end is not None:
                arguments["Range"] = f"bytes={offset}-{'' if end is None else end - 1}"
            if etag is not None:
                arguments["IfMatch"] = etag
            response = client.get_object(**arguments)
            # What is left of a body that nobody reads to its end would hold the connection.
            with closing(response["Body"]) as body:
                if etag is not None and response["ETag"] != etag:
                    raise changed_error(uri)
                etag = response["ETag"]
                # A server that ignores the range sends the object from its beginning to its end.
                is_part = "ContentRange" in response
                num_to_skip = 0 if is_part else offset
                sent_to = response["ContentLength"] + (offset if is_part else 0)
                if stop is None:
                    stop = sent_to
                elif sent_to < stop or (sent_to > stop and (is_part or end is None)):
                    raise changed_error(uri)
                for chunk in body.iter_chunks(CHUNK_BYTES):
                    if num_to_skip:
                        num_skipped = min(num_to_skip, len(chunk))
                        num_to_skip -= num_skipped
                        chunk = chunk[num_skipped:]
                    if chunk:
                        chunk = chunk[: stop - offset]
                        offset += len(chunk)
                        num_tries, delay_s = 0, _FIRST_DELAY_S
                        yield chunk
                        if offset == stop:
                            break
            if offset < stop:
                raise SourceUnavailableError(f"{uri} broke off at byte {offset} of {stop}.", uri=uri)
        except SourceUnavailableError:
            num_tries += 1
            if num_tries >= _MAX_TRIES_WITHOUT_PROGRESS:
                raise
        except CLIENT_ERRORS as error:
            if error_code(error) in ("PreconditionFailed", "412", "InvalidRange", "416"):
                raise changed_error(uri) from error
            if etag is not None and is_missing(error):
                raise gone_error(uri) from error
            num_tries += 1
            if not is_transient(error) or num_tries >= _MAX_TRIES_WITHOUT_PROGRESS:
                raise source_error(error, uri) from error
        if stop is None or offset < stop:
            sleep(delay_s)
            delay_s *= 2


def split_lines(chunks: Iterator[bytes], *, max_line_bytes: int, start_line: int) -> Iterator[LineBatch]:
    """Batches of lines, about one per chunk; memory is bounded by the chunk and `max_line_bytes`."""
    next_line, carry = 1, b""
    for chunk in chunks:
        lines = (carry + chunk).split(b"\n")
        carry = lines.pop()
        if len(carry) > max_line_bytes:
            # The rest of this line is dropped as it comes: what is kept already says that it is too long.
            carry = carry[: max_line_bytes + 1]
        if lines:
            yield from _batch(next_line, lines, max_line_bytes, start_line)
            next_line += len(lines)
    if carry:
        yield from _batch(next_line, [carry], max_line_bytes, start_line)


def _batch(first_line: int, lines: list[bytes], max_line_bytes: int, start_line: int) -> Iterator[LineBatch]:
    num_to_skip = min(max(0, start_line + 1 - first_line), len(lines))
    if num_to_skip:
        lines = lines[num_to_skip:]
        first_line += num_to_skip
    if not lines:
        return
    if max(map(len, lines)) > max_line_bytes:
        lines = [line if len(line) <= max_line_bytes else line[: max_line_bytes + 1] for line in lines]
    yield LineBatch(first_line, lines)
