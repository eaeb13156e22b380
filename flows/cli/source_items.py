"""Items of request files, local or in S3."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from blend_core.errors import ConfigurationError, SourceError
from flows.ingest.draft import SourceItem
from flows.ingest.items import read_content
from flows.ingest.parse import ParseOptions
from storage.compression import CHUNK_BYTES, plain_chunks
from storage.object_lines import split_lines
from storage.parquet_rows import ParquetRows, is_parquet


def source_items(source: str, options: ParseOptions) -> Iterator[list[SourceItem]]:
    """Parsed items, in batches, of a local file or of `s3://…` objects, as a job would read them under `s3`.

    Raises:
        ConfigurationError: the file, or what is in it, cannot be read.
        SourceError: the same of an object.
    """
    if source.startswith("s3://"):
        return _s3_items(source, options)
    path = Path(source)
    if not path.is_file():
        raise ConfigurationError(
            f"There is no file {source}; give a JSONL or Parquet file, or an address s3://bucket/key."
        )
    return _file_items(path, options)


def looks_like_parquet(path: Path) -> bool:
    """Whether a local file begins as Parquet does; False where it cannot be read."""
    try:
        with path.open("rb") as file:
            return is_parquet(file.read(4))
    except OSError:
        return False


def _file_items(path: Path, options: ParseOptions) -> Iterator[list[SourceItem]]:
    try:
        if looks_like_parquet(path):
            # Closed with the table.
            yield from read_content(str(path), ParquetRows(path.open("rb"), str(path)), options)
            return
        with path.open("rb") as file:
            chunks = plain_chunks(_chunks(file), str(path))
            lines = split_lines(chunks, max_line_bytes=options.max_line_bytes, start_line=0)
            yield from read_content(str(path), lines, options)
    except SourceError as error:
        # A file that is named on the command line is an argument that is wrong.
        raise ConfigurationError(error.message) from None
    except OSError as error:
        raise ConfigurationError(f"The file {path} cannot be read ({type(error).__name__}).") from None


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _s3_items(uri: str, options: ParseOptions) -> Iterator[list[SourceItem]]:
    from flows.cli.services import connected

    with connected() as wiring:
        for entry in wiring.objects.list(uri):
            content = wiring.objects.open_source(entry, max_line_bytes=options.max_line_bytes)
            yield from read_content(entry.uri, content, options)
