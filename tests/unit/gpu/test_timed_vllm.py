"""What our part of vLLM's scheduler took, brought from the engine's process, without vLLM."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from blend_core.engines.base import RequestsAdmitted
from blend_core.engines.process import EngineProcess
from blend_core.engines.vllm.engine import VllmEngine
from blend_core.engines.vllm.options import VllmEngineOptions
from blend_core.specs import load_device_profile
from tests.gpu.timed_vllm import SchedulerTime, TellingVllmEngine, TimedVllmProcess

OPTIONS = VllmEngineOptions("/models/none", "fcfs", load_device_profile("h200"))
ADMITTED = RequestsAdmitted((1, 2))


def test_the_engine_tells_it_after_its_events_in_words_that_cross_to_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(VllmEngine, "run", lambda self, source: iter([ADMITTED]))
    monkeypatch.setattr(VllmEngine, "added_s", 0.5)
    monkeypatch.setattr(VllmEngine, "beside_s", 0.2)
    monkeypatch.setattr(VllmEngine, "num_steps", 100)
    told = list(TellingVllmEngine(OPTIONS).run(object()))
    assert pickle.loads(pickle.dumps(told)) == [ADMITTED, SchedulerTime(0.5, 0.2, 100)]


def test_the_process_keeps_that_of_its_latest_run_and_passes_events_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = [SchedulerTime(0.5, 0.2, 100), None]

    def run(self: EngineProcess, source: object) -> Iterator[Any]:
        yield ADMITTED
        if (time := times.pop(0)) is not None:
            yield time

    monkeypatch.setattr(EngineProcess, "run", run)
    process = TimedVllmProcess(OPTIONS)
    assert list(process.run(object())) == [ADMITTED]
    assert process.scheduler_time.per_step() == {"added_s_per_step": 0.005, "beside_s_per_step": 0.002}
    # Given up before its end.
    assert list(process.run(object())) == [ADMITTED]
    assert process.scheduler_time.per_step() == {"added_s_per_step": 0.0, "beside_s_per_step": 0.0}
