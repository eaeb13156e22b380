"""Parquet objects as sources: requests in columns, and tables with a template."""

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blend_core.errors import SourceError
from blend_core.request import Request
from blend_core.tokenizing import Tokenizer
from flows.ingest.duplicates import DuplicateCheck
from flows.ingest.ingest import NumberedItem, number_items
from flows.ingest.parse import ParseOptions
from flows.ingest.sources import read_sources
from flows.job_spec import BatchJobSpec
from storage.objects import ObjectStore

pytestmark = pytest.mark.s3

URL = "/v1/chat/completions"


def parquet(columns: dict[str, Any], **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, **options)
    return file.getvalue()


def requests(ids: list[str | None], **change: Any) -> dict[str, Any]:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]})
    fixed = {"method": "POST", "url": URL, "body": body} | change
    return {"custom_id": ids} | {name: [value] * len(ids) for name, value in fixed.items()}


def line(custom_id: str) -> bytes:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body}).encode() + b"\n"


@pytest.fixture
def read(objects: ObjectStore, model_folder: Path) -> Any:
    def read_all(**sources: Any) -> list[NumberedItem]:
        spec = BatchJobSpec(**sources)
        batches = read_sources(spec, objects, {}, ParseOptions("tiny", default_max_tokens=8))
        numbered = number_items(
            batches, Tokenizer(model_folder), DuplicateCheck(fail_job=False), max_model_len=200
        )
        return [one for batch in numbered for one in batch]

    return read_all


def code(one: NumberedItem) -> str | None:
    return None if isinstance(one.outcome, Request) else one.outcome.code.value


def test_the_format_of_an_object_is_told_by_its_content(objects: ObjectStore, read: Any) -> None:
    objects.put("in/1.gz", line("plain"))
    objects.put("in/2.jsonl", gzip.compress(line("gzip 1")) + gzip.compress(line("gzip 2")))
    objects.put("in/3.jsonl", parquet(requests(["a", "b"]) | {"day": [1, 2]}))
    objects.put("in/4.parquet", pa.Codec("zstd").compress(line("zstd"), asbytes=True))
    objects.put("in/_SUCCESS", b"")
    found = read(s3=[objects.uri("in/")])
    assert [one.item.custom_id for one in found] == ["plain", "gzip 1", "gzip 2", "a", "b", "zstd"]
    assert [code(one) for one in found] == [None] * 6


def test_bad_rows_are_error_rows_with_their_number(objects: ObjectStore, read: Any) -> None:
    bodies = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in ("x", " ", "y", "z")]
    columns = requests(["a", "b", None, "a"]) | {"body": bodies}
    objects.put("in/r", parquet(columns, row_group_size=2))
    found = read(s3=[objects.uri("in/r")])
    assert [code(one) for one in found] == [None, "empty_prompt", "invalid_custom_id", "duplicate_custom_id"]
    assert [one.item.source_line for one in found] == [1, 2, 3, 4]
    assert json.loads(found[2].item.excerpt)["messages"][0]["content"] == "y"


def test_a_table_fills_a_template_as_a_query_does(objects: ObjectStore, read: Any) -> None:
    table = {
        "ticket": pa.array([1, 2, None, 4]),
        "body": ["broken", None, "x", "ok"],
        "price": pa.array([1.5, 2, 3, None]),
        "unused": [b"\xff" * 1000] * 4,
    }
    objects.put("lake/part-0.parquet", parquet(table, row_group_size=3))
    objects.put("lake/_metadata", b"of its writer")
    source = {
        "uri": objects.uri("lake/"),
        "prompt": "{{ body }} costs {{ price | default('nothing') }}",
        "id_column": "ticket",
        "max_tokens": 5,
    }
    found = read(parquet=[source])
    assert [code(one) for one in found] == [None, "template_failed", "invalid_custom_id", None]
    assert [one.item.custom_id for one in found] == ["1", "2", None, "4"]
    assert (found[0].item.excerpt, found[3].item.excerpt) == ("broken costs 1.5", "ok costs nothing")
    assert "'body' is NULL" in found[1].outcome.message
    assert "unused" not in found[1].item.excerpt
    assert found[0].outcome.sampling.max_tokens == 5

    (missing, *_) = read(parquet=[source | {"prompt": "{{ absent }}"}])
    assert "no column 'absent'" in missing.outcome.message


def test_what_is_wrong_with_a_table_is_a_source_error(objects: ObjectStore, read: Any) -> None:
    def check(match: str, **sources: Any) -> None:
        with pytest.raises(SourceError, match=match):
            read(**sources)

    content = parquet({"id": list(range(5_000)), "text": [f"some text {n}" for n in range(5_000)]})
    objects.put("good", content)
    objects.put("cut", content[:-100])
    objects.put("page", content[:300] + b"\xff" * 2_000 + content[2_300:])
    objects.put("lines", line("a"))
    objects.put("empty/_SUCCESS", b"")
    prompt = "{{ id }} {{ text }}"
    check("without the column `custom_id`", s3=[objects.uri("good")])
    check("no column 'key'", parquet=[{"uri": objects.uri("good"), "prompt": prompt, "id_column": "key"}])
    check("damaged or cut off .footer", parquet=[{"uri": objects.uri("cut"), "prompt": prompt}])
    check("row group 1 of 1", parquet=[{"uri": objects.uri("page"), "prompt": prompt}])
    check("no Parquet file", parquet=[{"uri": objects.uri("lines"), "prompt": prompt}])
    check("no table", parquet=[{"uri": objects.uri("empty/"), "prompt": prompt}])


def test_a_table_that_changes_after_the_listing_is_refused(objects: ObjectStore) -> None:
    objects.put("t", parquet({"id": [1], "text": ["a"]}))
    spec = BatchJobSpec(parquet=[{"uri": objects.uri("t"), "prompt": "{{ text }}"}])  # type: ignore[list-item]
    sources = read_sources(spec, objects, {}, ParseOptions("tiny"))
    objects.put("t", parquet({"id": [2], "text": ["b"]}))
    with pytest.raises(SourceError, match="changed while it was read"):
        next(iter(sources))


def test_of_a_wide_table_little_is_fetched(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = [bytes([number % 256]) * 5_000 for number in range(2_000)]
    table = {"id": range(2_000), "text": ["x"] * 2_000, "wide": wide}
    size = objects.put("t", parquet(table, compression="none", use_dictionary=False)).size_bytes
    num_bytes = 0

    from storage import ranged_file

    fetch = ranged_file.read_chunks

    def counted(*args: Any, **options: Any) -> Iterator[bytes]:
        nonlocal num_bytes
        for chunk in fetch(*args, **options):
            num_bytes += len(chunk)
            yield chunk

    monkeypatch.setattr(ranged_file, "read_chunks", counted)
    spec = BatchJobSpec(parquet=[{"uri": objects.uri("t"), "prompt": "{{ text }}"}])  # type: ignore[list-item]
    batches = list(read_sources(spec, objects, {}, ParseOptions("tiny")))
    assert sum(map(len, batches)) == 2_000
    assert num_bytes < size / 10
