"""Small jobs for the torch engine: requests, a plan over them, a source, and what came out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from blend_core.engines.base import (
    EngineEvent,
    RequestFailed,
    RequestFinished,
    RequestsAdmitted,
    StepWindow,
)
from blend_core.engines.torch.engine import TorchEngine
from blend_core.engines.torch.options import TorchEngineOptions
from blend_core.performance import StepTimeModel
from blend_core.plan import Plan, PlanSummary
from blend_core.request import Request, SamplingParams
from blend_core.specs import DeviceProfile

PROFILE = DeviceProfile(
    name="test",
    compute_flops_per_s=1e11,
    bandwidth_bytes_per_s=1e10,
    kv_capacity_bytes=1e7,
    gemm_efficiency=0.5,
    gemm_fixed_s_per_layer=1e-4,
    attention_bandwidth_efficiency=0.5,
    overlap_interference=0.1,
)
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


def request(seq: int, token_ids: Iterable[int], sampling: SamplingParams = GREEDY) -> Request:
    return Request(seq, np.array(list(token_ids), dtype=np.int32), sampling)


def random_requests(num_requests: int, *, seed: int = 0, sampling: SamplingParams = GREEDY) -> list[Request]:
    """Prompts of 1 to 200 tokens, every second one behind a shared start of 100."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, 1024, 100)
    prompts = []
    for seq in range(num_requests):
        own = rng.integers(3, 1024, rng.integers(1, 200))
        prompts.append(np.concatenate([shared, own]) if seq % 2 else own)
    return [request(seq, prompt, sampling) for seq, prompt in enumerate(prompts)]


def plan_over(
    requests: Sequence[Request], *, block_size: int = 16, revision: int = 0, policy: str = "fcfs"
) -> Plan:
    num_requests = len(requests)
    ones = np.ones(num_requests)
    summary = PlanSummary("tiny", "test", block_size, num_requests, 0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0)
    return Plan(
        revision=revision,
        policy=policy,
        summary=summary,
        seq=np.array([one.seq for one in requests], dtype=np.int64),
        num_prompt_tokens=np.array([one.num_prompt_tokens for one in requests], dtype=np.int32),
        num_shared_tokens=np.zeros(num_requests, dtype=np.int32),
        max_tokens=np.array([one.sampling.max_tokens for one in requests], dtype=np.int32),
        estimated_output_tokens=8 * ones,
        estimated_output_tokens_sq=64 * ones,
        compute_s=ones,
        memory_s=ones,
        lead=np.zeros(num_requests, dtype=np.bool_),
        length_group=np.full(num_requests, -1, dtype=np.int32),
        length_groups=(),
        step_times=StepTimeModel(1e-3, 1e-5, 2e-3, 1e-9, 1e-7, 0.15),
        progress=np.zeros(0),
        planned_density=np.zeros(0),
    )


class ListSource:
    """A `RequestSource` over a list; tests put revisions and withdrawals into it."""

    def __init__(self, requests: Sequence[Request], *, policy: str = "fcfs") -> None:
        self.requests = {one.seq: one for one in requests}
        self.first_plan = plan_over(requests, policy=policy)
        self.revisions: list[Plan] = []
        self.withdrawals: list[int] = []
        self.num_fetched = 0

    def plan(self) -> Plan:
        return self.first_plan

    def fetch(self, seqs: Sequence[int]) -> Sequence[Request]:
        self.num_fetched += len(seqs)
        return [self.requests[seq] for seq in seqs]

    def revision(self) -> Plan | None:
        return self.revisions.pop(0) if self.revisions else None

    def withdrawn(self) -> Sequence[int]:
        withdrawn, self.withdrawals = self.withdrawals, []
        return withdrawn

    def recalled(self) -> Sequence[int]:
        return ()


@dataclass
class Outcome:
    """The events of a run, sorted out."""

    finished: dict[int, RequestFinished] = field(default_factory=dict)
    failed: dict[int, RequestFailed] = field(default_factory=dict)
    windows: list[StepWindow] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)

    def add(self, event: EngineEvent) -> None:
        if isinstance(event, StepWindow):
            self.windows.append(event)
        elif isinstance(event, RequestsAdmitted):
            assert not set(event.seqs) & set(self.admitted), "a request was told as admitted twice"
            self.admitted += event.seqs
        else:
            assert event.seq not in self.finished, "two events for one request"
            assert event.seq not in self.failed, "two events for one request"
            if isinstance(event, RequestFinished):
                assert event.seq in self.admitted, "a request ended that was never told as admitted"
                self.finished[event.seq] = event
            else:
                self.failed[event.seq] = event

    @property
    def tokens(self) -> dict[int, tuple[int, ...]]:
        return {seq: event.output_token_ids for seq, event in sorted(self.finished.items())}

    def total(self, name: str) -> int:
        return sum(getattr(window, name) for window in self.windows)


def options(folder: Path, **changes: object) -> TorchEngineOptions:
    values: dict[str, object] = {
        "model_folder": str(folder),
        "policy": "fcfs",
        "device_profile": PROFILE,
        "dtype": "float32",
        "num_blocks": 600,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_threads": 1,
        **changes,
    }
    return TorchEngineOptions(**values)  # type: ignore[arg-type]  # tests name the fields they change


def run(
    folder: Path,
    source: ListSource | Sequence[Request],
    on_event: Callable[[EngineEvent], None] = lambda event: None,
    **changes: object,
) -> Outcome:
    """Runs to the end on a fresh engine and checks its block accounting."""
    engine = TorchEngine(options(folder, **changes))
    engine.open()
    outcome = Outcome()
    for event in engine.run(source if isinstance(source, ListSource) else ListSource(source)):
        outcome.add(event)
        on_event(event)
    engine.check_integrity()
    assert engine.num_referenced_blocks == 0
    engine.close()
    return outcome
