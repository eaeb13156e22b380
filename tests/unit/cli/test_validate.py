"""`blend validate` on files, without services."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.demo import DemoSize, demo_lines
from tests.tiny_llama import make_tiny_llama


def chat(custom_id: str, text: str, **body: object) -> bytes:
    return json.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": text}], **body},
        }
    ).encode()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def write_lines(*lines: bytes, end: bytes = b"\n") -> str:
        path = tmp_path / "requests.jsonl"
        path.write_bytes(end.join(lines) + end)
        return str(path)

    return write_lines


def test_good_lines_are_counted(blend: Callable[..., Any], write: Callable[..., str]) -> None:
    ran = blend("validate", write(chat("a", "x"), b"", chat("b", "y"), end=b"\r\n"), "--json")
    found = json.loads(ran.stdout)
    assert (ran.status, found["total"], found["valid"], found["invalid"]) == (0, 2, 2, 0)


def test_a_bad_line_has_number_code_and_reason(blend: Callable[..., Any], write: Callable[..., str]) -> None:
    ran = blend("validate", write(chat("a", "x"), b"", b"{nope", b"[1]"), "--json")
    assert ran.status == 0
    errors = json.loads(ran.stdout)["errors"]
    assert [(error["line"], error["code"]) for error in errors] == [(3, "invalid_json"), (4, "not_an_object")]
    assert all(error["reason"].endswith(".") for error in errors)


def test_a_repeated_id_names_the_first_line(blend: Callable[..., Any], write: Callable[..., str]) -> None:
    ran = blend("validate", write(chat("a", "x"), chat("b", "y"), chat("a", "z")))
    assert "line 3 (a): duplicate_custom_id" in ran.stdout
    assert "line 1" in ran.stdout


def test_an_id_is_found_again_thousands_of_lines_later(
    blend: Callable[..., Any], write: Callable[..., str]
) -> None:
    lines = [chat(str(number), "x") for number in range(5000)]
    found = json.loads(blend("validate", write(*lines, chat("7", "x")), "--json").stdout)
    assert [(error["line"], error["custom_id"]) for error in found["errors"]] == [(5001, "7")]


def test_a_gzip_file_is_read_as_it_is(blend: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "requests"
    path.write_bytes(gzip.compress(chat("a", "x")))
    assert json.loads(blend("validate", str(path), "--json").stdout)["valid"] == 1


def test_a_damaged_gzip_file_is_a_usage_error(blend: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "requests.gz"
    path.write_bytes(gzip.compress(chat("a", "x"))[:-9])
    assert blend("validate", str(path)).status == 2


def test_the_demo_has_six_lines_broken_in_six_ways(
    blend: Callable[..., Any], write: Callable[..., str]
) -> None:
    lines = demo_lines(DemoSize())
    found = json.loads(blend("validate", write(*lines), "--json").stdout)
    assert found["invalid"] == 6
    assert len(found["error_codes"]) == 6
    assert found["total"] == len(lines)


def test_parquet_and_compressed_lines_are_told_by_content(
    blend: Callable[..., Any], write: Callable[..., str]
) -> None:
    lines = [chat("a", "x"), chat("b", "y")]
    path = Path(write(*lines))
    content = path.read_bytes()
    requests = [json.loads(line) for line in lines]
    for request in requests:
        request["body"] = json.dumps(request["body"])
    requests[1]["body"] = "{nope"
    pq.write_table(pa.Table.from_pylist(requests), path)
    found = json.loads(blend("validate", str(path), "--json").stdout)
    (error,) = found["errors"]
    assert (found["total"], error["line"], error["custom_id"], error["code"]) == (2, 2, "b", "invalid_json")

    for packed in (gzip.compress(content), pa.Codec("zstd").compress(content, asbytes=True)):
        path.write_bytes(packed)
        assert json.loads(blend("validate", str(path), "--json").stdout)["valid"] == 2
        path.write_bytes(packed[:-4])
        ran = blend("validate", str(path))
        assert ran.status == 2
        assert "ends too early" in ran.stderr


def test_a_table_of_other_columns_is_told_what_it_needs(blend: Callable[..., Any], tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "text": ["x"]}), tmp_path / "t.parquet")
    ran = blend("validate", str(tmp_path / "t.parquet"))
    assert ran.status == 2
    assert "without the column `custom_id`" in ran.stderr
    assert "prompt template" in ran.stderr


def test_prompts_that_a_model_cannot_take_are_reported_under_their_codes(
    blend: Callable[..., Any], write: Callable[..., str], tmp_path: Path
) -> None:
    make_tiny_llama(tmp_path / "tiny")
    room = json.loads((tmp_path / "tiny/config.json").read_text())["max_position_embeddings"]
    ids = {"custom_id": "ids", "method": "POST", "url": "/v1/completions", "body": {"prompt": [-1]}}
    path = write(chat("good", "hi"), chat("long", "abc " * room), json.dumps(ids).encode())
    told = json.loads(blend("validate", path, "--model", "tiny", "--json").stdout)
    assert told["lengths_checked"]
    assert {error["line"]: error["code"] for error in told["errors"]}.items() >= {
        2: "prompt_too_long"
    }.items()
    assert (told["valid"], told["invalid"]) == (1, 2)


def test_it_says_where_lengths_were_not_checked(blend: Callable[..., Any], write: Callable[..., str]) -> None:
    path = write(chat("1", "abc " * 100_000))
    untold = "1 request: 1 valid, 0 invalid; lengths of prompts are not checked"
    assert blend("validate", path).stdout == f"{untold} without --model\n"
    named = blend("validate", path, "--model", "elsewhere").stdout
    assert named == f"{untold}, elsewhere is not here with its tokenizer\n"
    assert not json.loads(blend("validate", path, "--json").stdout)["lengths_checked"]
