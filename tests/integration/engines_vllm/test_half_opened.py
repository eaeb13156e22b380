"""What is left of vLLM where it started and the engine could still not be opened."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blend_core.engines.vllm import engine as engine_module
from blend_core.engines.vllm.engine import VllmEngine
from blend_core.engines.vllm.remote_control import RemoteControl
from blend_core.errors import EngineDiedError
from tests.integration.engines_vllm.vllm_runs import options


class StartedVllm:
    """As much of a vLLM that is up as the engine holds on to."""

    def __init__(self) -> None:
        self.is_up = True
        self.remote: RemoteControl | None = None
        inner = SimpleNamespace(scheduler=SimpleNamespace(control=None))
        self.engine_core = SimpleNamespace(engine_core=inner, shutdown=self.shut_down)

    def shut_down(self) -> None:
        self.is_up = False


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> StartedVllm:
    vllm = StartedVllm()

    def start(asked: object, remote: RemoteControl | None) -> tuple[StartedVllm, Any]:
        vllm.remote = remote
        return vllm, SimpleNamespace(model_config=SimpleNamespace(dtype="torch.float32"))

    monkeypatch.setattr(engine_module, "_start", start)
    monkeypatch.setattr(engine_module, "set_environment", lambda asked: None)
    monkeypatch.setattr(RemoteControl, "accept", lambda control: None)
    return vllm


@pytest.mark.parametrize(
    ("separate_core", "broken"),
    [
        (True, "remote_control.RemoteControl.accept"),
        (True, "remote_control.RemoteControl.limits"),
        (True, "engine.load_model_spec"),
        (False, "engine.load_model_spec"),
    ],
)
def test_vllm_and_the_socket_to_it_are_closed(
    started: StartedVllm, separate_core: bool, broken: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise EngineDiedError("It is gone.")

    monkeypatch.setattr(f"blend_core.engines.vllm.{broken}", fail)
    with pytest.raises(EngineDiedError, match="It is gone"):
        VllmEngine(options(tiny_llama, passed={"separate_core": separate_core})).open()

    assert not started.is_up
    assert (started.remote is not None) is separate_core
    assert started.remote is None or not Path(started.remote.address).exists()
