"""The job that `blend run` and `blend submit` build from a file and options."""

import re
import time
from pathlib import Path

import pytest

from blend_core.errors import ConfigurationError
from flows.cli.job_options import given_fields, job_of
from flows.job_parts import Policy
from flows.job_spec import load_job_file


def given(**options: object) -> dict[str, object]:
    names = (
        "s3", "parquet", "sql", "prompt", "system", "id_column", "connection", "model", "policy",
        "max_tokens", "name",
    )  # fmt: skip
    return given_fields(*(options.get(name) for name in names))  # type: ignore[arg-type]


def test_options_alone_make_a_job() -> None:
    spec = job_of(None, given(s3=["s3://b/k"], policy="dfs", max_tokens=7, name="n"))
    assert spec.s3 == ["s3://b/k"]
    assert spec.options.policy is Policy.DFS
    assert spec.options.default_max_tokens == 7
    assert spec.name == "n"


def test_a_query_file_with_its_template_is_a_source(tmp_path: Path) -> None:
    query = tmp_path / "q.sql"
    query.write_text("SELECT id, body FROM t")
    spec = job_of(None, given(sql=query, prompt="Say {{ body }}", connection="shop"))
    assert spec.sql[0].query == "SELECT id, body FROM t"
    assert spec.sql[0].connection == "shop"
    assert spec.sql[0].system is None


def test_a_table_with_its_template_is_a_source() -> None:
    spec = job_of(None, given(parquet="s3://b/t/", prompt="Say {{ body }}", id_column="ticket"))
    assert (spec.parquet[0].uri, spec.parquet[0].prompt) == ("s3://b/t/", "Say {{ body }}")
    assert spec.parquet[0].id_column == "ticket"
    with pytest.raises(ConfigurationError, match="need --prompt"):
        given(parquet="s3://b/t/")
    with pytest.raises(ConfigurationError, match="give --sql FILE or --parquet URI"):
        given(s3=["s3://b/k"], prompt="Say {{ body }}")


@pytest.mark.parametrize("begin", [b"PAR1", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b'{"custom_id": "a", '])
def test_a_request_file_given_as_job_is_told_by_its_content(tmp_path: Path, begin: bytes) -> None:
    path = tmp_path / "tonight"
    path.write_bytes(begin + bytes(100))
    with pytest.raises(ConfigurationError, match="looks like a request file"):
        job_of(path, {})


def test_options_go_over_the_job_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: m\ns3: [s3://b/k]\noptions: {policy: fcfs, seed: 3}\n")
    spec = job_of(file, given(policy="dual_scan"))
    assert spec.model == "m"
    assert spec.options.policy is Policy.DUAL_SCAN
    assert spec.options.seed == 3


def test_a_bucket_without_a_slash_is_no_address() -> None:
    with pytest.raises(ConfigurationError, match="s3://bucket/ for all of a bucket"):
        job_of(None, given(s3=["s3://requests"]))
    assert job_of(None, given(s3=["s3://requests/"])).s3 == ["s3://requests/"]


@pytest.mark.parametrize(("text", "reason"), [
    ("[" * 3_000, "nested too deeply"),
    ("s3: " + "[" * 100_000, "nested too deeply"),
    ("s3: " + "{a: " * 3_000, "nested too deeply"),
    ("# " + "x" * (1 << 20), "larger than 1 MiB"),
    ("name: 2026-99-99", "cannot be read as YAML"),
    ("a: [", "cannot be read as YAML"),
    ("a: \x00", "cannot be read as YAML"),
])  # fmt: skip
def test_a_file_that_is_no_job_is_refused_at_once(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    started_s = time.process_time()
    with pytest.raises(ConfigurationError, match=reason):
        load_job_file(file)
    assert time.process_time() - started_s < 10


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"options\.policy"):
        job_of(None, given(s3=["s3://b/k"], policy="best"))


@pytest.mark.parametrize(("field", "text"), [
    ("options.seed", "options: {seed: -1}"),
    ("options.seed", "options: {seed: 9223372036854775808}"),
    ("completion_window_hours", "completion_window_hours: 1.0e+300"),
    ("completion_window_hours", "completion_window_hours: .inf"),
    ("completion_window_hours", "completion_window_hours: .nan"),
    ("completion_window_hours", "completion_window_hours: 0"),
])  # fmt: skip
def test_a_number_out_of_range_is_refused_by_its_field(tmp_path: Path, field: str, text: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"s3: [s3://b/k]\n{text}\n")
    with pytest.raises(ConfigurationError, match=rf": {re.escape(field)}: must be"):
        job_of(file, {})


def test_every_fault_of_a_job_file_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "modle: m\ns3: s3://b/k\nsql: [{query: SELECT 1}]\nname: 7\noptions: {seed: -1, vllm: fast}\n"
    )
    with pytest.raises(ConfigurationError) as caught:
        job_of(file, {})
    assert str(caught.value).removeprefix(f"{file}: ").split("; ") == [
        "name: must be a text",
        "s3: must be a list (`[…]`, or lines that begin with `-`)",
        "sql.0.prompt: is missing",
        "options.vllm: must be names and their values (`name: value`)",
        "options.seed: must be greater than or equal to 0",
        "modle: there is no such field",
        "correct its name or leave it out.",
    ]


@pytest.mark.parametrize("text", ["", "just words", "- a list"])
def test_a_file_without_fields_is_no_job(tmp_path: Path, text: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match="must be fields and their values"):
        job_of(file, {})


def test_a_local_path_in_a_job_file_is_told_to_be_uploaded(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("s3: [in.jsonl]\n")
    with pytest.raises(ConfigurationError, match="`blend upload`"):
        job_of(file, {})
