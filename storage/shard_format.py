"""What a request shard looks like: its keys, its columns, and reading one."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from blend_core.request import Request, SamplingParams

SHARD_SCHEMA = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("max_tokens", pa.int32(), nullable=False),
        pa.field("min_tokens", pa.int32(), nullable=False),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("top_p", pa.float64(), nullable=False),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("seed", pa.int64()),
        # Bytes, since a stop string may hold half a character, which Arrow's text cannot.
        pa.field("stop", pa.list_(pa.binary()), nullable=False),
        pa.field("ignore_eos", pa.bool_(), nullable=False),
        pa.field("json_schema", pa.string()),
        pa.field("lora_adapter", pa.string()),
        pa.field("body", pa.binary(), nullable=False),
    ]
)
_INDEX_FIELDS: "list[pa.Field[Any]]" = [
    pa.field("key", pa.string(), nullable=False),
    pa.field("first_seq", pa.int64(), nullable=False),
    pa.field("last_seq", pa.int64(), nullable=False),
    pa.field("num_requests", pa.int64(), nullable=False),
    pa.field("num_prompt_tokens", pa.int64(), nullable=False),
]
INDEX_SCHEMA = pa.schema(_INDEX_FIELDS)


def shard_prefix(job_id: str) -> str:
    """Where a job's shards are."""
    return f"jobs/{job_id}/requests/"


def arrow_bytes(table: pa.Table) -> bytes:
    """A table as an Arrow IPC file of one record batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return sink.getvalue().to_pybytes()


class Shard:
    """One downloaded shard, memory-mapped: the operating system keeps of it what is being read.

    Attributes:
        num_bytes: size of the file.
        seq: `(num_requests,)` ascending.
        offsets: `(num_requests + 1,)` into `tokens`.
        tokens: the prompts one after the other.
    """

    __slots__ = ("_columns", "num_bytes", "offsets", "seq", "tokens")

    def __init__(self, path: Path) -> None:
        """Maps the file; it may be unlinked after that."""
        self.num_bytes = path.stat().st_size
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        self._columns: dict[str, Any] = {name: table.column(name).chunk(0) for name in table.column_names}
        self.seq: npt.NDArray[np.int64] = self._columns["seq"].to_numpy()
        token_ids = self._columns["token_ids"]
        self.offsets: npt.NDArray[np.int32] = token_ids.offsets.to_numpy()
        self.tokens: npt.NDArray[np.int32] = token_ids.values.to_numpy()

    def row(self, seq: int) -> int | None:
        """Where the request is, or None."""
        row = int(np.searchsorted(self.seq, seq))
        return row if row < len(self.seq) and self.seq[row] == seq else None

    def request(self, row: int) -> Request:
        """The request of a row."""
        values = {
            name: self._columns[name][row].as_py()
            for name in ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos")
        }
        # A shard of an earlier version has no such columns.
        json_schema, lora_adapter = (
            self._columns[name][row].as_py() if name in self._columns else None
            for name in ("json_schema", "lora_adapter")
        )
        stop = tuple(text.decode(errors="surrogatepass") for text in self._columns["stop"][row].as_py())
        # A copy: it must outlive the mapped file, and is small.
        tokens = self.tokens[self.offsets[row] : self.offsets[row + 1]].copy()
        tokens.flags.writeable = False
        sampling = SamplingParams(stop=stop, json_schema=json_schema, **values)
        return Request(int(self.seq[row]), tokens, sampling, lora_adapter)

    def body(self, row: int) -> bytes:
        """The bytes it came from."""
        return bytes(self._columns["body"][row].as_py())

    def column(self, name: str) -> npt.NDArray[np.int32]:
        """`(num_requests,)` values of an integer column."""
        array: npt.NDArray[np.int32] = self._columns[name].to_numpy()
        return array
