"""Small jobs for the vLLM engine, and what came out of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from blend_core.engines.base import EngineEvent
from blend_core.engines.vllm.engine import VllmEngine
from blend_core.engines.vllm.options import VllmEngineOptions
from blend_core.request import Request
from tests.unit.engines_torch.runs import PROFILE, ListSource, Outcome, plan_over

BLOCK_SIZE = 32


class Block32Source(ListSource):
    """A source whose plan is for vLLM's blocks."""

    def __init__(self, requests: Sequence[Request], *, policy: str = "fcfs") -> None:
        super().__init__(requests, policy=policy)
        self.first_plan = plan_over(requests, block_size=BLOCK_SIZE, policy=policy)


def options(folder: Path, **changes: object) -> VllmEngineOptions:
    values: dict[str, object] = {
        "model_folder": str(folder),
        "policy": "fcfs",
        "device_profile": PROFILE,
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_threads": 1,
        "passed": {"separate_core": False, "num_gpu_blocks_override": 601},
        **changes,
    }
    return VllmEngineOptions(**values)  # type: ignore[arg-type]  # tests name the fields they change


def run_on(
    engine: VllmEngine,
    source: ListSource,
    on_event: Callable[[EngineEvent], None] = lambda event: None,
) -> Outcome:
    outcome = Outcome()
    for event in engine.run(source):
        outcome.add(event)
        on_event(event)
    return outcome


def run_with_policy(
    engine: VllmEngine,
    source: ListSource,
    policy: str,
    on_event: Callable[[EngineEvent], None] = lambda event: None,
    **changes: object,
) -> Outcome:
    """Runs on an engine that is open already, under another policy or with other options of a run."""
    before = engine._opened
    engine._opened = replace(before, options=replace(before.options, policy=policy, **changes))
    try:
        return run_on(engine, source, on_event)
    finally:
        engine._opened = before
