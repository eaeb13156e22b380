"""What the processes of an engine load before vLLM."""

import os
import subprocess
import sys

import pytest

from blend_core.engines.vllm.engine import set_environment
from blend_core.engines.vllm.options import VllmEngineOptions
from blend_core.errors import ConfigurationError
from blend_core.specs import load_device_profile

LOADED_FIRST = (
    "blend_core.engines.process_child",
    "blend_core.engines.vllm.factory",
    "blend_core.engines.vllm.engine",
    "blend_core.engines.vllm.control",
    "blend_core.engines.vllm.remote_control",
)


def test_no_numba_is_loaded_before_vllm():
    """vLLM for CPUs cannot start beside it."""
    code = f"import sys, {', '.join(LOADED_FIRST)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numba", "llvmlite"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("device", "seen", "chosen"),
    [("cuda:0,1", "", "0,1"), ("cuda:1", "6,4", "4"), ("cuda:0,1", "6,4", "6,4"), ("cuda", "6", "6")],
)
def test_vllm_sees_the_gpus_of_its_rank(
    device: str, seen: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": seen})
    set_environment(VllmEngineOptions("model", "fcfs", load_device_profile("h200"), device))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == chosen


def test_a_gpu_that_is_not_visible_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "6"})
    with pytest.raises(ConfigurationError, match="device is cuda:1 and CUDA_VISIBLE_DEVICES=6;"):
        set_environment(VllmEngineOptions("model", "fcfs", load_device_profile("h200"), "cuda:1"))
