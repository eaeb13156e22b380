"""The comparison with vLLM's own batch runner: what makes it no comparison, and its processes."""

from pathlib import Path

import pytest

from blend_core.engines.vllm.installed import InstalledVllm
from blend_core.errors import EngineError
from flows.bench import versus
from flows.bench.versus_process import RunFigures, VersusRun
from flows.settings import EngineSettings, Settings

SETTINGS = Settings(engine=EngineSettings(device="cpu"))


@pytest.fixture
def prompt_tokens(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Tokens that a way to run the file says it computed, 1,200 unless put in here; nothing is run."""
    told: dict[str, int] = {}

    def measure(run: VersusRun, folder: Path) -> tuple[RunFigures, float]:
        busy_s = 4.0 if run.name == "run-batch" else 2.0
        return RunFigures(told.get(run.name, 1200), 80, busy_s, 0.5, 0, 0.0), 9.0

    monkeypatch.setattr(versus, "_measure", measure)
    monkeypatch.setattr(versus, "_model_folder", lambda settings, model, folder: folder)
    monkeypatch.setattr(versus, "installed_vllm", lambda: InstalledVllm("0.32.0", "cpu"))
    return told


@pytest.mark.usefixtures("prompt_tokens")
def test_speeds_are_compared_with_those_of_run_batch() -> None:
    found = versus.run_versus_bench(SETTINGS, "random-llama", 8, 2, lambda line: None)
    ratios = {run.name: run.ratio_to_run_batch for setting in found.settings for run in setting.runs}
    assert ratios == {"run-batch": 1, "fcfs": 2, "dfs": 2, "dual_scan": 2, "density_matched": 2}


def test_ways_that_did_not_compute_the_same_prompts_are_not_compared(prompt_tokens: dict[str, int]) -> None:
    prompt_tokens["dfs"] = 1201
    with pytest.raises(EngineError, match=r"1,200 tokens under run-batch and 1,201 under dfs, so .*; take a"):
        versus.run_versus_bench(SETTINGS, "random-llama", 8, 1, lambda line: None)
