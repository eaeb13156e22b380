"""Request rows and error rows of ingest, by COPY."""

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from blend_core.errors import RequestErrorCode
from storage.database import Database


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One line or row of a source. seq counts every non-blank line and row of the job from 0, bad ones included.

    Attributes:
        source_uri: `s3://…` or `sql:<name>`; never with a password.
        source_line: line of the object or row of the query, from 1.
        endpoint: `/v1/chat/completions` or `/v1/completions`; None where the line did not tell.
        model: the line's own `model`, recorded only.
        prompt_excerpt: first characters of the prompt, of the raw line for a bad one.
        shard_index: shard that holds the token ids; None for a bad line.
        num_cleaned… text that Postgres cannot hold is cleaned and flagged on write.
    """

    seq: int
    source_uri: str
    source_line: int
    custom_id: str | None = None
    endpoint: str | None = None
    model: str | None = None
    num_prompt_tokens: int | None = None
    max_tokens: int | None = None
    prompt_excerpt: str | None = None
    shard_index: int | None = None


class RequestWriter:
    """Writes a job's requests in batches. Opening resets an unfinished ingest; a clean exit marks the ingest complete."""

    def __init__(self, db: Database, job_id: str) -> None: ...

    def add(self, row: RequestRow) -> None:
        """A valid request."""

    def add_error(self, row: RequestRow, code: RequestErrorCode, message: str) -> None:
        """A bad one: a request row and an errored result."""

    @property
    def num_total(self) -> int:
        """Rows added."""

    @property
    def num_errored(self) -> int:
        """Bad ones among them."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
