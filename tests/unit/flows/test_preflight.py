"""What is refused before a job is made."""

import json
from pathlib import Path
from typing import Any

import pytest

from blend_core.engines.vllm.installed import InstalledVllm
from blend_core.engines.vllm.passed_options import CLOSED_OPTIONS
from blend_core.errors import ConfigurationError
from flows.ingest.parse import ParseOptions
from flows.job_spec import BatchJobSpec, parse_job
from flows.preflight import check_engine, check_queries, check_submitted
from flows.settings import EngineSettings, Settings
from flows.wiring import Endpoints, Wiring
from tests.tiny_llama import make_tiny_llama


def job(query: str = "SELECT id FROM t", prompt: str = "{{ id }}", **fields: Any) -> BatchJobSpec:
    return BatchJobSpec.model_validate({"sql": [{"query": query, "prompt": prompt, **fields}]})


@pytest.mark.parametrize(
    "query",
    [
        "SELECT 1",
        "\n  select 1",
        "-- why\n/* how\n */ (SELECT 1)",
        "WITH t AS (SELECT 1) TABLE t",
        "VALUES (1)",
        "TABLE t",
    ],
)
def test_a_statement_that_reads_is_let_through(query: str) -> None:
    check_queries(job(query), {"platform": ""})


@pytest.mark.parametrize(
    "query", ["DELETE FROM t", "-- SELECT\nDROP TABLE t", "selection", "  ", "EXPLAIN SELECT 1"]
)
def test_a_statement_that_does_not_read_is_told_to_be_one_select(query: str) -> None:
    with pytest.raises(ConfigurationError, match="must be one SELECT"):
        check_queries(job(query), {"platform": ""})


def test_an_unknown_connection_is_told_where_to_be_set() -> None:
    with pytest.raises(ConfigurationError, match=r"BLEND_SOURCES__SHOP .* environment of `blend up`"):
        check_queries(job(connection="shop"), {"platform": ""})


def test_a_template_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="`prompt` template"):
        check_queries(job(prompt="{{ id"), {"platform": ""})


JSON = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (JSON, "Answers by a JSON schema need the engine `vllm`, and this job runs on `torch`"),
        ({"lora_adapter": "support"}, "The job has no LoRA adapter 'support'; name it in"),
    ],
)
def test_what_the_engine_cannot_do_for_any_row_is_refused_as_in_a_line(
    fields: dict[str, Any], reason: str
) -> None:
    torch = ParseOptions("m", keeps_schemas=False, lora_adapters=frozenset())
    table = {"uri": "s3://b/k", "prompt": "x", **fields}
    tables = BatchJobSpec.model_validate({"parquet": [table]})
    for spec in (job(**fields), tables):
        check_queries(spec, {"platform": ""})
        check_queries(spec, {"platform": ""}, ParseOptions("m", lora_adapters=frozenset({"support"})))
        with pytest.raises(ConfigurationError, match=reason):
            check_queries(spec, {"platform": ""}, torch)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"response_format": {"type": "xml"}}, "`response_format` must be an object whose `type` is text"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
            r"`response_format.json_schema.schema` is no JSON schema: \$.type",
        ),
        ({"lora_adapter": ""}, "`lora_adapter` must be a name"),
    ],
)
def test_what_a_line_could_not_ask_for_a_source_cannot(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        parse_job({"sql": [{"query": "SELECT 1", "prompt": "x", **fields}]}, origin="job")


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"device": "abacus"}, "BLEND_ENGINE__DEVICE 'abacus'"),
        ({"device": "cuda:77"}, "BLEND_ENGINE__DEVICE is 'cuda:77'"),
        ({"device_profile": "gone"}, "gone"),
        (
            {"name": "torch", "kv_gib": 1e-9},
            "no room for a block of 16 tokens of model .*tiny; raise BLEND_ENGINE__KV_GIB",
        ),
    ],
)
def test_an_engine_that_cannot_be_opened_is_refused(
    tmp_path: Path, engine: dict[str, str], reason: str
) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    settings = Settings(home=tmp_path, engine=EngineSettings(**engine))
    wiring = Wiring.from_settings(settings, Endpoints("postgresql://127.0.0.1:9/none"))
    with pytest.raises(ConfigurationError, match=reason):
        check_engine(wiring, job().model_copy(update={"model": str(model)}))


def test_weights_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    wiring = Wiring.from_settings(Settings(home=tmp_path), Endpoints("postgresql://127.0.0.1:9/none"))
    spec = BatchJobSpec.model_validate(
        {"s3": ["s3://b/k"], "model": str(model), "options": {"engine": "torch"}}
    )
    check_engine(wiring, spec)
    weights = model / "model.safetensors"
    shard = model / "model-00001-of-00001.safetensors"
    shard.write_bytes(weights.read_bytes()[:-1])
    for check in (check_engine, check_submitted):
        with pytest.raises(ConfigurationError, match=r"has a model-00001-of-00001\.safetensors .* not whole"):
            check(wiring, spec)
    # Only the files of the index are the model's.
    index = {"weight_map": {"model.norm.weight": weights.name}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    check_engine(wiring, spec)


def test_an_adapter_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.serving.installed_vllm", lambda: InstalledVllm("0.32.0", "cpu"))
    model = make_tiny_llama(tmp_path / "tiny")
    wiring = Wiring.from_settings(Settings(home=tmp_path), Endpoints("postgresql://127.0.0.1:9/none"))
    options = {"engine": "vllm", "vllm": {"lora_adapters": {"support": str(tmp_path / "gone")}}}
    spec = BatchJobSpec.model_validate({"s3": ["s3://b/k"], "model": str(model), "options": options})
    with pytest.raises(
        ConfigurationError, match=f"'support' cannot be used: {tmp_path / 'gone'} is no folder"
    ):
        check_engine(wiring, spec)


def test_a_context_longer_than_the_models_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.serving.installed_vllm", lambda: InstalledVllm("0.32.0", "cpu"))
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0")
    model = make_tiny_llama(tmp_path / "tiny", max_model_len=256)
    asked = {"s3": ["s3://b/k"], "model": str(model)}
    machine = {"max_model_len": 512}
    settings = Settings(home=tmp_path, engine=EngineSettings(vllm=machine))
    of_machine = Wiring.from_settings(settings, Endpoints("postgresql://127.0.0.1:9/none"))
    of_job = Wiring.from_settings(Settings(home=tmp_path), Endpoints("postgresql://127.0.0.1:9/none"))
    for wiring, options in ((of_machine, {}), (of_job, {"vllm": machine})):
        spec = BatchJobSpec.model_validate(asked | {"options": {"engine": "vllm"} | options})
        with pytest.raises(ConfigurationError, match=r"'max_model_len' is 512, and .* is 256 tokens"):
            check_engine(wiring, spec)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    allowing = Settings(home=tmp_path, engine=EngineSettings(vllm=machine))
    check_engine(Wiring.from_settings(allowing, Endpoints("postgresql://127.0.0.1:9/none")), spec)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"dtype": "float99"},
            "'dtype' is 'float99'; give one of float, float32, float16, auto, bfloat16, half",
        ),
        ({"kv_cache_dtype": "FP8"}, "'kv_cache_dtype' is 'FP8'; give one of auto, bfloat16, "),
        ({"kv_cache_dtype": "fp8_e4m2"}, "'kv_cache_dtype' is 'fp8_e4m2'; give one of fp8_e[45]m[23], "),
        ({"lora_dtype": "float32"}, "'lora_dtype' is 'float32'; give one of float16, bfloat16, auto"),
        ({"optimization_level": 4}, "'optimization_level' is 4; give one of 0, 1, 2, 3"),
        ({"tensor_parallel_size": 3}, r"'tensor_parallel_size' is 3, and .* has 4 attention heads"),
        ({"kv_cache_memory_bytes": 8}, "no room for a block of 32 .*; raise the vLLM option `kv_cache_mem"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr("flows.serving.installed_vllm", lambda: InstalledVllm("0.32.0", "cpu"))
    model = make_tiny_llama(tmp_path / "tiny")
    wiring = Wiring.from_settings(Settings(home=tmp_path), Endpoints("postgresql://127.0.0.1:9/none"))
    asked = {"s3": ["s3://b/k"], "model": str(model), "options": {"engine": "vllm", "vllm": options}}
    with pytest.raises(ConfigurationError, match=reason):
        check_engine(wiring, BatchJobSpec.model_validate(asked))


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option, values in CLOSED_OPTIONS.items() for value in values]
)
def test_every_value_of_vllms_is_let_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: str | int
) -> None:
    monkeypatch.setattr("flows.serving.installed_vllm", lambda: InstalledVllm("0.32.0", "cpu"))
    model = make_tiny_llama(tmp_path / "tiny")
    wiring = Wiring.from_settings(Settings(home=tmp_path), Endpoints("postgresql://127.0.0.1:9/none"))
    options = {"engine": "vllm", "vllm": {option: value}}
    asked = {"s3": ["s3://b/k"], "model": str(model), "options": options}
    check_engine(wiring, BatchJobSpec.model_validate(asked))


def test_a_stored_job_with_a_value_that_vllm_does_not_know_is_read() -> None:
    """It could not be cancelled otherwise."""
    asked = {"s3": ["s3://b/k"], "model": "m", "options": {"vllm": {"kv_cache_dtype": "fp9"}}}
    assert BatchJobSpec.model_validate(asked).options.vllm == {"kv_cache_dtype": "fp9"}


def submitted(tmp_path: Path, machine: EngineSettings | None = None, **options: Any) -> None:
    settings = Settings(home=tmp_path, engine=machine or EngineSettings())
    model = make_tiny_llama(tmp_path / "tiny", max_model_len=256)
    spec = BatchJobSpec.model_validate({"s3": ["s3://b/k"], "model": str(model), "options": options})
    check_submitted(Wiring.from_settings(settings, Endpoints("postgresql://127.0.0.1:9/none")), spec)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_model_len": 512}, "'max_model_len' is 512, and .* is 256 tokens"),
        ({"tensor_parallel_size": 3}, "'tensor_parallel_size' is 3"),
        ({"kv_cache_dtype": "fp9"}, "'kv_cache_dtype' is 'fp9'; give one of fp8, "),
        (
            {"lora_adapters": {"support": "/gone/support"}},
            "'support' cannot be used: /gone/support is no folder",
        ),
    ],
)
def test_a_job_whose_vllm_options_cannot_work_is_not_submitted_whether_vllm_is_here_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str
) -> None:
    for installed in (None, InstalledVllm("0.32.0", "cpu")):
        monkeypatch.setattr("flows.serving.installed_vllm", lambda installed=installed: installed)
        with pytest.raises(ConfigurationError, match=reason):
            submitted(tmp_path, vllm=options)
    with pytest.raises(ConfigurationError, match="its engine is `torch`; leave them out"):
        submitted(tmp_path, engine="torch", vllm=options)


def test_what_another_environment_may_have_otherwise_is_no_reason_not_to_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.serving.installed_vllm", lambda: None)
    submitted(tmp_path, EngineSettings(name="torch"), vllm={"max_model_len": 64})
    submitted(tmp_path, EngineSettings(vllm={"max_model_len": 512}), engine="vllm")
    submitted(tmp_path, EngineSettings(vllm={"max_model_len": 512}), vllm={"max_loras": 2})
    submitted(tmp_path, vllm={"lora_adapters": {"support": "adapters/support"}})


def test_a_home_of_nobody_is_no_folder_of_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'support' cannot be used: ~nobody-of-that-name/support is"):
        submitted(tmp_path, vllm={"lora_adapters": {"support": "~nobody-of-that-name/support"}})


def test_what_the_machine_lets_vllm_take_is_submitted(tmp_path: Path) -> None:
    longer = {"max_model_len": 512}
    with pytest.raises(ConfigurationError, match="'max_model_len' is 512"):
        submitted(tmp_path, vllm=longer)
    overrides = {"hf_overrides": {"max_position_embeddings": 512}}
    submitted(tmp_path, EngineSettings(vllm=overrides), vllm=longer)
