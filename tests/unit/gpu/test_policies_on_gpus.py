"""The scripts that run policies on a GPU, without one: what they count and tell, and how they end."""

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest

from blend_core.engines.base import EngineEvent, EngineInfo, RequestFailed, RequestFinished, StepWindow
from blend_core.engines.simulated import SimulatedEngine
from blend_core.engines.vllm.options import VllmEngineOptions
from blend_core.errors import EngineStartError, RequestErrorCode
from blend_core.policies.base import EngineLimits
from blend_core.specs import ModelSpec, load_device_profile, model_spec_preset
from tests.gpu import torch_policies, vllm_policies
from tests.gpu.timed_vllm import SchedulerTime
from tests.tiny_llama import make_tiny_llama

FIGURES: dict[str, object] = {
    "policy": "fcfs",
    "output_tokens_per_s": 50.0,
    "prefix_sharing": 0.25,
    "num_preempted": 3,
    "num_failed": 0,
}

WARMING_UP = 1.0
"""Output tokens per second of the run of the torch engine that is not told."""

SCRIPTS_WITH_ENGINES = [(vllm_policies, "TimedVllmProcess"), (torch_policies, "TorchEngine")]


class EngineThatFails:
    """Answers no request."""

    scheduler_time = SchedulerTime()

    def __init__(self, options: object) -> None:
        pass

    def open(self) -> EngineInfo:
        spec = ModelSpec("tiny", 1, 2, 64, 4, 2, 32, 4, 4096, 1024)
        limits = EngineLimits(32, 600, 8, 64)
        return EngineInfo("vllm", spec, load_device_profile("h200"), limits, {"async_scheduling": "false"})

    def run(self, source: object) -> Iterator[EngineEvent]:
        yield RequestFailed(0, 0, RequestErrorCode.PROMPT_TOO_LONG, "It is too long.", 0.0)

    def check_integrity(self) -> None:
        pass

    def close(self) -> None:
        pass


class EngineThatAnswersTwo(EngineThatFails):
    """Answers two requests in two windows and fails a third."""

    def run(self, source: object) -> Iterator[EngineEvent]:
        yield RequestFinished(0, 0, "", (5, 6, 7), "length", 40, 0, 0.0, 1.0)
        yield window(num_steps=4, num_prefill_tokens=64, num_preempted=1)
        yield RequestFinished(1, 0, "", (5,), "length", 60, 25, 0.0, 1.0)
        yield window(num_steps=2, num_prefill_tokens=16, num_preempted=2)
        yield from super().run(source)


class SimulatedVllm(SimulatedEngine):
    """vLLM's options on the simulator."""

    scheduler_time = SchedulerTime()

    def __init__(self, options: VllmEngineOptions) -> None:
        num_blocks = options.passed.get("num_gpu_blocks_override", 100_000)
        super().__init__(
            model_spec_preset("llama-3.1-8b"),
            options.device_profile,
            EngineLimits(
                options.block_size, num_blocks, options.max_num_seqs, options.max_num_batched_tokens
            ),
            options.policy,
            overlap=False,
            output_lengths=lambda request: request.sampling.max_tokens,
        )

    def open(self) -> EngineInfo:
        return replace(super().open(), details={"async_scheduling": "true"})


def window(**counts: int) -> StepWindow:
    return StepWindow(**dict.fromkeys((field.name for field in fields(StepWindow)), 0) | counts)


@pytest.fixture(autouse=True)
def alarm_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Its exit status."""
    monkeypatch.setattr(sys, "argv", ["script", "--device", "cuda", "--requests", "8", *arguments])
    with pytest.raises(SystemExit) as ended:
        script.main()
    status = ended.value.code
    assert isinstance(status, int)
    return status


@pytest.mark.parametrize(("script", "engine"), SCRIPTS_WITH_ENGINES)
def test_figures_are_counted_from_the_events_of_a_run(
    script: ModuleType, engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, engine, EngineThatAnswersTwo)
    assert run(script, monkeypatch, "--rounds", "1") == 1
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [one["policy"] for one in runs] == ["fcfs", "dfs", "dual_scan", "density_matched"]
    for one in runs:
        assert one["output_tokens_per_s"] * one["busy_s"] == pytest.approx(4)
        assert one["total_tokens_per_s"] * one["busy_s"] == pytest.approx(104)
        assert one["prefix_sharing"] == pytest.approx(0.25)
        assert (one["num_preempted"], one["num_prefill_tokens"], one["num_steps"]) == (3, 80, 6)
        assert one["num_failed"] == 1


def test_kv_of_the_vllm_script_is_so_scarce_that_order_matters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_policies, "TimedVllmProcess", SimulatedVllm)
    monkeypatch.setattr(sys, "argv", ["script", "--rounds", "1"])
    with pytest.raises(SystemExit, match="0"):
        vllm_policies.main()
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert all(one["async_scheduling"] is True for one in runs)
    sharing = {one["policy"]: one["prefix_sharing"] for one in runs}
    assert all(sharing[policy] > 1.1 * sharing["fcfs"] for policy in sharing if policy != "fcfs")


@pytest.mark.parametrize(("script", "engine"), SCRIPTS_WITH_ENGINES)
def test_runs_of_which_every_request_failed_are_told_and_end_with_status_1(
    script: ModuleType, engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, engine, EngineThatFails)
    assert run(script, monkeypatch, "--rounds", "1") == 1
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(one["num_failed"], one["prefix_sharing"]) for one in runs] == [(1, 0.0)] * 4


def test_runs_on_vllm_that_take_too_long_are_given_up_and_the_others_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    num_begun = 0

    def measure(policy: str, folder: Path, asked: argparse.Namespace) -> dict[str, object]:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 3:
            time.sleep(60)
        return FIGURES

    monkeypatch.setattr(vllm_policies, "measure", measure)
    assert run(vllm_policies, monkeypatch, "--model", str(tmp_path), "--limit-s", "0.5") == 0
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert (told["num_runs_asked"], len(told["runs"])) == (12, 2)
    assert printed.err.splitlines() == [
        "1 of 12: fcfs, 50.0 output tokens/s, 1.00x fcfs, sharing 25.0%, 3 preempted, 0 failed",
        "2 of 12: fcfs, 50.0 output tokens/s, 1.00x fcfs, sharing 25.0%, 3 preempted, 0 failed",
        "Time is over after 0.5 s: 2 of 12 runs are through.",
    ]


@pytest.mark.parametrize(("script", "untold"), [(vllm_policies, 0), (torch_policies, 1)])
def test_runs_before_one_that_cannot_start_are_told(
    script: ModuleType, untold: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    num_begun = 0

    def measure(policy: str, folder: Path, asked: argparse.Namespace) -> dict[str, object]:
        nonlocal num_begun
        num_begun += 1
        if num_begun == untold + 3:
            raise EngineStartError("Memory does not suffice.")
        return FIGURES

    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr(script, "make_random_llama", make_tiny_llama)
    monkeypatch.setattr(sys, "argv", ["script"])
    with pytest.raises(EngineStartError):
        script.main()
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 2


def test_no_run_in_time_is_no_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm_policies, "measure", lambda *arguments: time.sleep(60))
    assert run(vllm_policies, monkeypatch, "--model", str(tmp_path), "--limit-s", "0.1") == 1


def test_both_scripts_reckon_with_the_same_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profiles = []

    def measure(policy: str, folder: Path, asked: argparse.Namespace) -> dict[str, object]:
        profiles.append(asked.device_profile)
        return FIGURES

    for script in (vllm_policies, torch_policies):
        monkeypatch.setattr(script, "measure", measure)
        monkeypatch.setattr(script, "make_random_llama", make_tiny_llama)
        assert run(script, monkeypatch, "--rounds", "1") == 0
    assert set(profiles) == {"h200"}


@pytest.mark.parametrize(("script", "untold"), [(vllm_policies, []), (torch_policies, [WARMING_UP])])
def test_runs_are_set_beside_fcfs_of_their_round(
    script: ModuleType,
    untold: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    speeds = iter([*untold, 50.0, 60.0, 70.0, 80.0, 100.0, 50.0, 60.0, 0.0])

    def measure(policy: str, folder: Path, asked: argparse.Namespace) -> dict[str, object]:
        return FIGURES | {"policy": policy, "output_tokens_per_s": next(speeds)}

    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr(script, "make_random_llama", make_tiny_llama)
    assert run(script, monkeypatch, "--rounds", "2") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [one["to_fcfs"] for one in runs] == pytest.approx([1.0, 1.2, 1.4, 1.6, 1.0, 0.5, 0.6, 0.0])


@pytest.mark.parametrize("script", [vllm_policies, torch_policies])
def test_help_tells_defaults_and_how_to_read_the_figures(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(script, monkeypatch, "--help") == 0
    told = capsys.readouterr().out
    assert " ".join(told.split()).count("(default: ") == told.count("\n  --")
    assert all(key in told for key in ("to_fcfs", "prefix_sharing", "num_preempted", "num_failed"))
