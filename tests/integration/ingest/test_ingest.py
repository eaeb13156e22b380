"""Sources in S3 and Postgres become request shards and rows; bad ones error rows; the counts reconcile."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from blend_core.errors import ConfigurationError, SourceError
from blend_core.tokenizing import Tokenizer
from flows.ingest.draft import SourceItem
from flows.ingest.ingest import IngestCounts, ingest
from flows.ingest.parse import ParseOptions
from flows.ingest.sources import read_sources
from flows.job_parts import SqlSource
from flows.job_spec import BatchJobSpec
from storage.database import Database
from storage.jobs import create_job, get_job
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.request_shard_writer import RequestShardWriter
from storage.request_shards import open_request_shards
from storage.requests import RequestWriter
from storage.schema import request, result

pytestmark = [pytest.mark.postgres, pytest.mark.s3]

MAX_MODEL_LEN = 200


def line(custom_id: Any, content: str = "Hi", **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": content}], **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


class Job:
    """A job whose sources can be ingested, and what the database and the shards then hold."""

    def __init__(self, db: Database, objects: ObjectStore, model_folder: Path, **sources: Any) -> None:
        self.database, self.objects = db, objects
        self.spec = BatchJobSpec(**sources)
        self.tokenizer = Tokenizer(model_folder)
        self.job_id = create_job(db, name="t", model="tiny", spec=self.spec.model_dump(mode="json"))

    def batches(self) -> Iterator[list[SourceItem]]:
        urls = {"platform": self.database.url}
        return read_sources(self.spec, self.objects, urls, ParseOptions("tiny", default_max_tokens=50))

    def ingest(self, batches: Iterator[Sequence[SourceItem]] | None = None) -> IngestCounts:
        return ingest(
            self.batches() if batches is None else batches,
            self.tokenizer,
            RequestWriter(self.database, self.job_id),
            RequestShardWriter(self.objects, Run("run", self.job_id, 1)),
            max_model_len=MAX_MODEL_LEN,
            fail_job_on_duplicate=self.spec.options.on_duplicate == "job",
        )

    def rows(self) -> list[Any]:
        query = (
            sa.select(request, result.c.error_code, result.c.error_message)
            .outerjoin(result, sa.and_(result.c.job_id == request.c.job_id, result.c.seq == request.c.seq))
            .where(request.c.job_id == self.job_id)
            .order_by(request.c.seq)
        )
        with self.database.connect() as connection:
            return list(connection.execute(query))


MIXED = "\r\n".join(
    [
        line("a"),
        "",
        line("b", content="x" * 900),
        "not json",
        line("a", content="again"),
        line("c", max_tokens=1_000, temperature=0),
        line("d", stream=True),
        '{"custom_id":"e","method":"POST","url":"/v1/completions","body":{"prompt":[1,2,5000]}}',
        '{"custom_id":"f","method":"POST","url":"/v1/completions",'
        '"body":{"prompt":"Hi\\u0000 there","max_tokens":3}}',
    ]
)


@pytest.fixture
def mixed_job(db: Database, objects: ObjectStore, model_folder: Path) -> Job:
    objects.put("in/mixed.jsonl", MIXED.encode())
    return Job(db, objects, model_folder, s3=[objects.uri("in/mixed.jsonl")])


def test_every_line_is_a_request_or_an_error_row(mixed_job: Job) -> None:
    counts = mixed_job.ingest()
    rows = mixed_job.rows()
    assert (counts.total, counts.errored) == (8, 5)
    assert [row.seq for row in rows] == list(range(8))
    assert [row.source_line for row in rows] == [1, 3, 4, 5, 6, 7, 8, 9]
    assert [row.error_code for row in rows] == [
        None, "prompt_too_long", "invalid_json", "duplicate_custom_id", None, "unsupported_value",
        "token_out_of_vocabulary", None,
    ]  # fmt: skip
    assert [row.custom_id for row in rows] == ["a", "b", None, "a", "c", "d", "e", "f"]
    assert "line 1 of s3://" in rows[3].error_message
    assert rows[7].text_cleaned
    job = get_job(mixed_job.database, mixed_job.job_id)
    assert (job.num_total, job.num_errored) == (8, 5)
    assert job.ingested_at is not None


def test_shards_hold_what_the_engine_needs(mixed_job: Job) -> None:
    counts = mixed_job.ingest()
    with open_request_shards(mixed_job.database, mixed_job.objects, mixed_job.job_id) as shards:
        first, capped, completion = shards.fetch([0, 4, 7])
        assert json.loads(shards.body(4))["custom_id"] == "c"
    tokenizer = mixed_job.tokenizer
    chat_ids = tokenizer.encode_chat([[{"role": "user", "content": "Hi"}]])[0]
    assert first.prompt_token_ids.tolist() == chat_ids.tolist()  # type: ignore[union-attr]
    assert first.sampling.max_tokens == 50
    assert capped.sampling.max_tokens == MAX_MODEL_LEN - capped.num_prompt_tokens
    assert (completion.sampling.max_tokens, completion.sampling.temperature) == (3, 1.0)
    assert counts.num_prompt_tokens == sum(one.num_prompt_tokens for one in (first, capped, completion))


def test_an_ingest_that_broke_off_is_done_anew(mixed_job: Job) -> None:
    def broken() -> Iterator[Sequence[SourceItem]]:
        yield from mixed_job.batches()
        raise SourceError("The source broke off.")

    with pytest.raises(SourceError):
        mixed_job.ingest(broken())
    assert get_job(mixed_job.database, mixed_job.job_id).ingested_at is None
    assert mixed_job.ingest().total == len(mixed_job.rows()) == 8


def test_objects_of_a_prefix_and_rows_of_a_query_follow_one_another(
    db: Database, objects: ObjectStore, model_folder: Path
) -> None:
    with db.connect() as connection:
        connection.execute(sa.text("CREATE TABLE ticket (id int, body text, price numeric)"))
        connection.execute(
            sa.text(
                "INSERT INTO ticket VALUES (1, 'broken', 1.50), (2, NULL, 2), (NULL, 'x', 3), (4, 'ok', NULL)"
            )
        )
    objects.put("prefix/2.jsonl", (line("b") + "\n").encode())
    objects.put("prefix/1.jsonl", line("1").encode())
    source = SqlSource(
        query="SELECT id, body, price FROM ticket ORDER BY id NULLS LAST",
        prompt="{{ body }} costs {{ price | default('nothing') }}",
        system="Label it.",
        max_tokens=5,
    )
    job = Job(db, objects, model_folder, s3=[objects.uri("prefix/")], sql=[source])
    job.ingest()
    rows = job.rows()
    assert [(row.source_uri.rsplit("/", 1)[-1], row.source_line, row.custom_id) for row in rows] == [
        ("1.jsonl", 1, "1"), ("2.jsonl", 1, "b"),
        ("sql:1", 1, "1"), ("sql:1", 2, "2"), ("sql:1", 3, "4"), ("sql:1", 4, None),
    ]  # fmt: skip
    assert [row.error_code for row in rows] == [
        None, None, "duplicate_custom_id", "template_failed", None, "invalid_custom_id",
    ]  # fmt: skip
    assert "'body' is NULL" in rows[3].error_message
    assert rows[4].prompt_excerpt == "ok costs nothing"


def test_a_job_may_fail_at_a_duplicate(db: Database, objects: ObjectStore, model_folder: Path) -> None:
    objects.put("in/twice.jsonl", f"{line('a')}\n{line('a')}\n".encode())
    options = {"on_duplicate": "job"}
    job = Job(db, objects, model_folder, s3=[objects.uri("in/twice.jsonl")], options=options)
    with pytest.raises(SourceError, match="'a' was used before, by line 1"):
        job.ingest()


def test_what_is_wrong_with_a_source_is_said_before_reading(
    db: Database, objects: ObjectStore, model_folder: Path
) -> None:
    def check(match: str, kind: type[Exception], **sources: Any) -> None:
        with pytest.raises(kind, match=match):
            Job(db, objects, model_folder, **sources).batches()

    check("no object", SourceError, s3=[objects.uri("in/absent.jsonl")])
    check(
        "BLEND_SOURCES__SHOP",
        ConfigurationError,
        sql=[SqlSource(query="SELECT 1", prompt="x", connection="shop")],
    )
    check("`prompt` template", ConfigurationError, sql=[SqlSource(query="SELECT 1", prompt="{{")])


def test_an_overlong_line_is_read_past_and_the_rest_goes_on(
    db: Database, objects: ObjectStore, model_folder: Path
) -> None:
    with objects.uploader("in/long.jsonl") as upload:
        upload.write(line("a").encode() + b"\n")
        for _ in range(9):
            upload.write(b"x" * (1 << 20))
        upload.write(b"\n" + line("b").encode())
    job = Job(db, objects, model_folder, s3=[objects.uri("in/long.jsonl")])
    job.ingest()
    assert [(row.custom_id, row.error_code) for row in job.rows()] == [
        ("a", None), (None, "line_too_long"), ("b", None),
    ]  # fmt: skip


def test_requests_carry_the_key_of_their_template_unless_their_length_is_preset(
    db: Database, objects: ObjectStore, model_folder: Path
) -> None:
    lines = [
        line("a", "Put one label to this text: one"),
        line("b", "Put one label to this text: two"),
        line("c", "Say in a word what this text is about: one"),
        # Cut to the room that the context leaves, which makes it no other template.
        line("d", "Put one label to this text: " + "one two " * 70),
        line("preset", "Put one label to this text: one", max_tokens=5, min_tokens=5),
        line("one token", "Put one label to this text: one", max_tokens=1),
        "not json",
    ]
    objects.put("in/templates.jsonl", "\n".join(lines).encode())
    job = Job(db, objects, model_folder, s3=[objects.uri("in/templates.jsonl")])
    job.ingest()

    rows = job.rows()
    first, second, other, cut, *no_key = [row.prompt_template for row in rows]
    assert rows[3].max_tokens < 50
    assert first == second == cut != other
    assert None not in (first, other)
    assert no_key == [None, None, None]
