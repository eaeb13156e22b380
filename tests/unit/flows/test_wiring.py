from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from blend_core.engines.vllm.installed import InstalledVllm
from blend_core.errors import ConfigurationError
from blend_core.specs import DeviceProfile, ModelSpec
from flows.job_parts import JobOptions
from flows.job_spec import BatchJobSpec
from flows.rank_devices import rank_devices
from flows.serving import Serving
from flows.settings import EngineSettings, Settings, load_settings
from flows.wiring import Endpoints, Wiring

JOB = BatchJobSpec(s3=["s3://bucket/in.jsonl"])
URL = "postgresql://blend:secret@127.0.0.1:9/blend"


def make_settings(tmp_path: Path, **values: Any) -> Settings:
    return Settings(home=tmp_path, **values)


def test_without_a_database_the_user_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="blend up"):
        Endpoints.from_settings(make_settings(tmp_path))


def test_endpoints_come_from_the_settings_and_show_no_secret(tmp_path: Path) -> None:
    settings = make_settings(
        tmp_path,
        database={"url": URL},
        object_store={"endpoint_url": "http://127.0.0.1:9", "access_key": "AK", "secret_key": "hidden"},
    )

    endpoints = Endpoints.from_settings(settings)

    assert endpoints.database_url == URL
    assert endpoints.s3_secret_key == "hidden"
    assert "secret@" not in repr(endpoints)
    assert "hidden" not in repr(endpoints)


@pytest.mark.parametrize(
    ("asked", "recorded"),
    [({"engine": "torch"}, "torch"), ({"engine": "vllm"}, "vllm")],
    ids=["torch", "vllm"],
)
def test_a_run_is_recorded_with_the_engine_that_serves_its_job(
    tmp_path: Path, asked: dict[str, str], recorded: str
) -> None:
    job = BatchJobSpec.model_validate({"s3": ["s3://bucket/in.jsonl"], "options": asked})

    wiring = Wiring.from_settings(make_settings(tmp_path), Endpoints(database_url=URL))

    assert wiring.engine_name(job) == recorded


def test_sql_sources_are_named_in_any_case(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, sources={"crm": "postgresql://127.0.0.1:9/crm"})

    urls = Wiring.from_settings(settings, Endpoints(database_url=URL)).source_urls()

    assert urls["CRM"] == urls["crm"] == "postgresql://127.0.0.1:9/crm"
    assert urls["platform"] == URL


def test_sql_sources_read_the_platform_by_its_reader(tmp_path: Path) -> None:
    reader = "postgresql://blend_reader:secret@127.0.0.1:9/blend"

    urls = Wiring.from_settings(make_settings(tmp_path), Endpoints(URL, reader)).source_urls()

    assert urls["platform"] == reader


def test_limits_of_the_engine_follow_its_memory(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, engine=EngineSettings(kv_gib=1.0, block_size=16, max_num_seqs=8))
    spec = ModelSpec("tiny", 1, 2, 64, 4, 2, 32, 4, 4096, 1024)

    limits = Wiring.from_settings(settings, Endpoints(database_url=URL)).engine_limits(JOB, spec)

    assert limits.num_blocks == (1 << 30) // (16 * spec.kv_bytes_per_token)
    assert (limits.block_size, limits.max_num_seqs) == (16, 8)


def test_an_unknown_model_is_named_with_the_way_to_add_it(tmp_path: Path) -> None:
    wiring = Wiring.from_settings(make_settings(tmp_path), Endpoints(database_url=URL))

    with pytest.raises(ConfigurationError, match="blend model add no-such-model"):
        wiring.engine(BatchJobSpec(model="no-such-model", s3=["s3://bucket/in.jsonl"]), 0, ["cpu"])


def vllm_is(monkeypatch: pytest.MonkeyPatch, found: InstalledVllm | None) -> None:
    monkeypatch.setattr("flows.serving.installed_vllm", lambda: found)


def serving(tmp_path: Path, options: dict[str, Any] | None = None, **engine: Any) -> Serving:
    settings = EngineSettings(dtype="float32", **engine)
    return Serving.of(settings, JobOptions.model_validate(options or {}))


@pytest.mark.parametrize(
    ("found", "device", "engine"),
    [
        (None, "cpu", "torch"),
        (InstalledVllm("0.32.0", "cpu"), "cpu", "vllm"),
        (InstalledVllm("0.32.4", "cuda"), "cuda:1", "vllm"),
        (InstalledVllm("0.32.0", "cuda"), "cpu", "torch"),
        (InstalledVllm("0.33.0", "cpu"), "cpu", "torch"),
    ],
)
def test_auto_takes_vllm_where_it_is_there_and_suits_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: InstalledVllm | None, device: str, engine: str
) -> None:
    vllm_is(monkeypatch, found)
    assert serving(tmp_path, device=device).engine == engine
    assert serving(tmp_path, {"engine": "torch"}, device=device).engine == "torch"


def test_vllm_that_is_asked_for_and_not_there_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_is(monkeypatch, None)
    how = (
        r"run `make setup-vllm` .*, or on CUDA `pip install --no-deps vllm==0\.32\.0` beside the extra `vllm`"
    )
    with pytest.raises(ConfigurationError, match=how):
        serving(tmp_path, {"engine": "vllm"})
    with pytest.raises(ConfigurationError, match=how):
        serving(tmp_path, {"vllm": {"dtype": "half"}})
    with pytest.raises(ConfigurationError, match="its engine is `torch`; leave them out"):
        serving(tmp_path, {"engine": "torch", "vllm": {"dtype": "half"}})
    vllm_is(monkeypatch, InstalledVllm("0.33.0", "cpu"))
    with pytest.raises(ConfigurationError, match=r"0\.33\.0 is installed .*; " + how):
        serving(tmp_path, name="vllm")


def test_a_dry_run_plans_for_the_vllm_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_is(monkeypatch, None)
    settings = EngineSettings(block_size=16)
    asked = JobOptions.model_validate({"engine": "vllm", "vllm": {"max_model_len": 64}})
    planned = Serving.to_plan(settings, asked, is_device_here=True)
    assert (planned.engine, planned.block_size) == ("vllm", 32)
    assert planned.max_model_len(ModelSpec("tiny", 1, 2, 64, 4, 2, 32, 4, 4096, 1024)) == 64
    has_options = JobOptions.model_validate({"vllm": {"dtype": "half"}})
    assert Serving.to_plan(settings, has_options, is_device_here=True).is_vllm
    assert Serving.to_plan(settings, JobOptions(), is_device_here=True).engine == "torch"
    asks_for_torch = JobOptions.model_validate({"engine": "torch", "vllm": {"dtype": "half"}})
    machine_has_torch = EngineSettings(name="torch")
    for machine, job in ((settings, asks_for_torch), (machine_has_torch, has_options)):
        with pytest.raises(ConfigurationError, match="its engine is `torch`"):
            Serving.to_plan(machine, job, is_device_here=True)


@pytest.mark.parametrize("found", [None, InstalledVllm("0.32.0", "cpu")])
def test_a_dry_run_refuses_what_vllm_cannot_do_on_this_cpu(
    monkeypatch: pytest.MonkeyPatch, found: InstalledVllm | None
) -> None:
    vllm_is(monkeypatch, found)
    asked = JobOptions.model_validate({"engine": "vllm", "vllm": {"pipeline_parallel_size": 2}})
    with pytest.raises(ConfigurationError, match="'pipeline_parallel_size' is for GPUs"):
        Serving.to_plan(EngineSettings(), asked, is_device_here=True)
    assert Serving.to_plan(EngineSettings(), asked, is_device_here=False).is_vllm


def test_options_of_the_job_come_over_those_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_is(monkeypatch, InstalledVllm("0.32.0", "cuda"))
    spec = ModelSpec("tiny", 1, 2, 64, 4, 2, 32, 4, 4096, 1024)
    machine = {"tensor_parallel_size": 2, "max_model_len": 9000}
    chosen = serving(tmp_path, {"vllm": {"max_model_len": 100}}, device="cuda", vllm=machine)

    assert chosen.vllm_options == {"tensor_parallel_size": 2, "max_model_len": 100}
    assert chosen.max_model_len(spec) == 100
    assert chosen.kv_capacity_bytes is None
    profile = DeviceProfile("d", 1.0, 1.0, 1e9, 1.0, 0.0, 1.0, 0.0)
    assert chosen.limits(spec, profile).num_blocks == 2 * 10**9 // (16 * spec.kv_bytes_per_token)


def test_what_to_raise_for_more_kv_is_what_gives_it_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_is(monkeypatch, InstalledVllm("0.32.0", "cpu"))
    assert serving(tmp_path).kv_setting == "BLEND_ENGINE__KV_GIB"
    for option in ("kv_cache_memory_bytes", "num_gpu_blocks_override"):
        assert serving(tmp_path, {"vllm": {option: 100}}).kv_setting == f"the vLLM option `{option}`"
    vllm_is(monkeypatch, InstalledVllm("0.32.0", "cuda"))
    assert "BLEND_ENGINE__DEVICE_PROFILE" in serving(tmp_path, device="cuda").kv_setting


def test_vllm_on_a_cpu_takes_blocks_of_a_multiple_of_32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_is(monkeypatch, InstalledVllm("0.32.0", "cpu"))
    assert [serving(tmp_path, block_size=size).block_size for size in (1, 16, 32, 33)] == [32, 32, 32, 64]


@pytest.mark.parametrize("option", [{"pipeline_parallel_size": 2}, {"async_scheduling": True}])
def test_what_vllm_cannot_do_on_a_cpu_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: dict[str, Any]
) -> None:
    (name,) = option
    vllm_is(monkeypatch, InstalledVllm("0.32.0", "cpu"))
    with pytest.raises(ConfigurationError, match=f"'{name}' is for GPUs"):
        serving(tmp_path, {"vllm": option})
    with pytest.raises(ConfigurationError, match=f"'{name}' is for GPUs"):
        serving(tmp_path, vllm=option)
    vllm_is(monkeypatch, InstalledVllm("0.32.0", "cuda"))
    assert serving(tmp_path, {"vllm": option}, device="cuda").vllm_options == option


def test_an_unknown_vllm_option_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match="'tensor_parallel_size' is 0; it must be at least 1"):
        JobOptions.model_validate({"vllm": {"tensor_parallel_size": 0}})
    for share in (0, 1.9):
        with pytest.raises(ValidationError, match=r"'gpu_memory_utilization' is .*; it is a share"):
            JobOptions.model_validate({"vllm": {"gpu_memory_utilization": share}})
    with pytest.raises(ValidationError, match="'no_such' is not known"):
        JobOptions.model_validate({"vllm": {"no_such": 1}})
    with pytest.raises(
        ValidationError, match=r"not known \(did you mean 'max_model_len'\?\); those that are:"
    ):
        JobOptions.model_validate({"vllm": {"max_model_length": 100}})
    monkeypatch.setenv("BLEND_ENGINE__VLLM__NO_SUCH", "1")
    named = "variable BLEND_ENGINE__VLLM__NO_SUCH: The vLLM option 'no_such' is not known"
    with pytest.raises(ConfigurationError, match=named):
        load_settings()
    monkeypatch.delenv("BLEND_ENGINE__VLLM__NO_SUCH")
    monkeypatch.setenv("BLEND_ENGINE__VLLM__TENSOR_PARALLEL_SIZE", "2")
    assert load_settings().engine.vllm == {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("kv_cache_memory_bytes", -5, "it must be at least 1"),
        ("num_gpu_blocks_override", 1, "it must be at least 2"),
        ("cpu_offload_gb", -0.5, "it must be at least 0"),
        ("cpu_offload_gb", float("nan"), "it must be a finite number"),
        ("gpu_memory_utilization", float("inf"), "it must be a finite number"),
        ("max_loras", 0, "it must be at least 1"),
        ("max_cpu_loras", 0, "it must be at least 1"),
        ("max_lora_rank", 17, "give one of 1, 8, 16, 32, 64, 128, 256, 320, 512"),
    ],
)
def test_a_value_that_vllm_can_never_take_is_refused(option: str, value: object, told: str) -> None:
    with pytest.raises(ValidationError, match=f"'{option}' is {value}; {told}"):
        JobOptions.model_validate({"vllm": {option: value}})


LOOP: dict[str, object] = {}
LOOP["rope_parameters"] = LOOP


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("hf_overrides", {"rope_parameters": {"factor": float("nan")}}),
        ("compilation_config", {"compile_sizes": [1, float("inf")]}),
        ("structured_outputs_config", {"backend": float("-inf")}),
        ("cudagraph_capture_sizes", [1, float("nan")]),
        ("hf_overrides", LOOP),
    ],
)
def test_what_a_stored_job_cannot_keep_of_an_option_is_refused(option: str, value: object) -> None:
    with pytest.raises(ValidationError, match=f"vLLM option '{option}' has a part that a job cannot keep"):
        JobOptions.model_validate({"vllm": {option: value}})


def test_the_parts_of_an_option_may_be_anything_else() -> None:
    value = {"rope_parameters": {"factor": 2.5, "rope_type": None}, "sizes": [1, True, "x"]}
    assert JobOptions.model_validate({"vllm": {"hf_overrides": value}}).vllm == {"hf_overrides": value}


def test_a_wrong_vllm_option_is_told_with_its_value_and_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, told in (
        ({"max_model_len": 0}, "'max_model_len' is 0; give a number of tokens from 1, -1 for as many as "),
        ({"max_model_len": -2}, "'max_model_len' is -2; give a number"),
        ({"max_model_len": "lots"}, "'max_model_len' is 'lots'; it must be a whole number"),
        ({"enforce_eager": 1}, "'enforce_eager' is 1; it must be true or false"),
        ({"cpu_offload_gb": []}, r"'cpu_offload_gb' is \[\]; it must be a number"),
        ({"compilation_config": "x"}, "is 'x'; it must be an object of names and values or a whole number"),
    ):
        with pytest.raises(ValidationError, match=told):
            JobOptions.model_validate({"vllm": options})
    assert JobOptions.model_validate({"vllm": {"max_model_len": -1}}).vllm == {"max_model_len": -1}
    monkeypatch.setenv("BLEND_ENGINE__VLLM__DTYPE", "float99")
    with pytest.raises(
        ConfigurationError, match="variable BLEND_ENGINE__VLLM__DTYPE: The vLLM option 'dtype'"
    ):
        load_settings()
    monkeypatch.setenv("BLEND_ENGINE__VLLM__DTYPE", "half")
    monkeypatch.setenv("BLEND_ENGINE__VLLM__MAX_MODEL_LEN", "lots")
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    assert str(caught.value) == (
        "Environment variable BLEND_ENGINE__VLLM__MAX_MODEL_LEN: The vLLM option 'max_model_len' is 'lots'; "
        "it must be a whole number."
    )
    monkeypatch.delenv("BLEND_ENGINE__VLLM__MAX_MODEL_LEN")
    monkeypatch.setenv("BLEND_ENGINE__VLLM", '{"max_loras": "few"}')
    with pytest.raises(ConfigurationError, match="variable BLEND_ENGINE__VLLM: The vLLM option 'max_loras'"):
        load_settings()


def test_a_rank_of_a_model_that_is_spread_over_gpus_has_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    assert rank_devices("cuda", None, 2) == ("cuda:0,1", "cuda:2,3")
    assert rank_devices("cuda", 1, 2) == ("cuda:0,1",)
    with pytest.raises(ConfigurationError, match="asks for 3 ranks"):
        rank_devices("cuda", 3, 2)
    with pytest.raises(ConfigurationError, match="needs 2 GPUs"):
        rank_devices("cuda:1", None, 2)
