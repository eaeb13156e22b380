"""Lines of a request file, local or in S3."""

import gzip
from collections.abc import Iterator
from pathlib import Path

from blend_core.errors import ConfigurationError

MAX_LINE_BYTES = 8 << 20


def source_lines(source: str) -> Iterator[tuple[int, bytes]]:
    """Numbered lines (from 1, without line end) of a local file, plain or gzip, or of `s3://…` objects.

    A line over the limit is cut to one byte more than the limit.

    Raises:
        ConfigurationError: the file cannot be read.
        SourceError: there is no such object.
    """
    if source.startswith("s3://"):
        return _s3_lines(source)
    path = Path(source)
    if not path.is_file():
        raise ConfigurationError(
            f"There is no file {source}; give a JSONL file or an address s3://bucket/key."
        )
    return _file_lines(path)


def _file_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as probe:
            is_gzip = probe.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_gzip else path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 2):
                number += 1
                rest = line
                while not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE_BYTES)):
                    pass
                yield number, line.removesuffix(b"\n")
    except (OSError, EOFError) as error:
        raise ConfigurationError(f"The file {path} cannot be read ({type(error).__name__}).") from None


def _s3_lines(uri: str) -> Iterator[tuple[int, bytes]]:
    from flows.cli.services import connected

    with connected() as wiring:
        for entry in wiring.objects.list(uri):
            yield from wiring.objects.iter_lines(entry, max_line_bytes=MAX_LINE_BYTES)
