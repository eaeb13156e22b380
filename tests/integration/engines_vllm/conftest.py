"""vLLM on a tiny model, loaded once: in this process, and with its core apart."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from blend_core.engines.vllm.engine import VllmEngine
from blend_core.engines.vllm.installed import installed_vllm, why_not_vllm
from tests.integration.engines_vllm.vllm_runs import options
from tests.tiny_llama import make_tiny_llama


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why_not = why_not_vllm("cpu", installed_vllm())
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.vllm)
        # vLLM and what it imports warn of much that is not ours.
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if why_not is not None and os.environ.get("CI") != "true":
            item.add_marker(pytest.mark.skip(reason=why_not))


@pytest.fixture(autouse=True)
def tests_importable_in_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process imports what it is given by module name: `tests` must be on the path it inherits."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """What one engine sets for vLLM would count as the user's setting for the next one."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with its tokenizer."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny_llama")


def opened(folder: Path, *, separate_core: bool) -> Iterator[VllmEngine]:
    """vLLM with 24 blocks of KV for 16 in flight."""
    engine = VllmEngine(
        options(
            folder,
            max_num_seqs=16,
            max_num_batched_tokens=128,
            passed={
                "separate_core": separate_core,
                "num_gpu_blocks_override": 25,
                # A random model would write spaces for ever.
                "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
            },
        )
    )
    with patch.dict(os.environ):
        engine.open()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def engine(tiny_llama: Path) -> Iterator[VllmEngine]:
    """vLLM in this process. There can be one of it in a process."""
    yield from opened(tiny_llama, separate_core=False)


@pytest.fixture(scope="session")
def engine_apart(tiny_llama: Path) -> Iterator[VllmEngine]:
    """vLLM whose core is in a process of its own, as in production."""
    yield from opened(tiny_llama, separate_core=True)


@pytest.fixture(params=["engine", "engine_apart"])
def either_engine(request: pytest.FixtureRequest) -> VllmEngine:
    """One after the other."""
    found: VllmEngine = request.getfixturevalue(request.param)
    return found
