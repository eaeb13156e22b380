"""Options for vLLM that cannot work are refused by the commands that run nothing themselves, too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_llama import make_tiny_llama

REFUSED = [
    ("max_model_len: 512", "'max_model_len' is 512"),
    ("tensor_parallel_size: 3", "'tensor_parallel_size' is 3"),
    ("lora_adapters: {support: /gone/support}", "'support' cannot be used: /gone/support is no folder"),
]


def job_file(folder: Path, option: str) -> str:
    model = make_tiny_llama(folder / "tiny", max_model_len=256)
    file = folder / "job.yaml"
    file.write_text(
        f"model: {model}\ns3: [s3://b/k]\noptions:\n  engine: vllm\n  vllm:\n    {option}\n", encoding="utf-8"
    )
    return str(file)


@pytest.mark.parametrize(("option", "reason"), REFUSED)
def test_such_a_job_is_not_submitted(
    blend: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, reason: str
) -> None:
    monkeypatch.setenv("BLEND_DATABASE__URL", "postgresql://127.0.0.1:9/none")
    monkeypatch.setenv("BLEND_OBJECT_STORE__ENDPOINT_URL", "http://127.0.0.1:9")
    ran = blend("submit", job_file(tmp_path, option))
    assert (ran.status, ran.stdout) == (2, "")
    assert reason in ran.stderr


@pytest.mark.parametrize(("option", "reason"), REFUSED)
def test_such_a_job_is_not_planned_for_this_machine(
    blend: Callable[..., Any], tmp_path: Path, option: str, reason: str
) -> None:
    file = job_file(tmp_path, option)
    ran = blend("plan", file)
    assert (ran.status, ran.stdout) == (2, "")
    assert reason in ran.stderr
    # Another device is another machine's: this one goes on to the sources, which need services.
    elsewhere = blend("plan", file, "--device", "h100")
    assert "do not run" in elsewhere.stderr


def test_a_value_that_no_vllm_takes_is_refused_for_any_device(
    blend: Callable[..., Any], tmp_path: Path
) -> None:
    for option, reason in (
        ("max_model_len: 0", "'max_model_len' is 0; give a number of tokens from 1"),
        ("kv_cache_dtype: fp9", "'kv_cache_dtype' is 'fp9'; give one of fp8, "),
        ("dtype: float99", "'dtype' is 'float99'; give one of float, float32, "),
    ):
        ran = blend("plan", job_file(tmp_path, option), "--device", "h100")
        assert (ran.status, ran.stdout) == (2, "")
        assert reason in ran.stderr
