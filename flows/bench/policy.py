"""`blend bench policy`: what a policy costs per step, with many requests in flight."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from blend_core.errors import PlanError
from blend_core.plan import Plan
from blend_core.planner import LENGTH_AWARE_POLICIES, PlanConfig, build_plan
from blend_core.policies.base import Admission, AdmissionPolicy, EngineLimits, EngineView, Side
from blend_core.policies.factory import POLICY_NAMES, make_policy
from blend_core.segment_requests import SegmentRequests
from blend_core.simulation.prompts import PromptBlocks
from blend_core.simulation.stepper import Stepper
from blend_core.studies.study import BLOCK_SIZE
from flows.bench.study_tasks import study_target

NUM_IN_FLIGHT: Final = (1_000, 10_000)
NUM_STEPS: Final = 2_000

PREFILL_TOKENS: Final = 2_048
"""Prompt tokens of a step at most, beside a token of each request in flight."""

KV_ROOM: Final = 1.1
"""KV by what the requests in flight hold on average: next to full, and hardly ever preempted."""

KV_ROOM_AHEAD: Final = {"density_matched": 2.4}
"""The same of a policy that needs more for as many: it leaves KV free for those in flight to grow into."""

HIDDEN_MAX_TOKENS: Final = 4_096
"""Bound of every answer where lengths are hidden."""

NUM_PREFIXES: Final = 50
"""Prefixes that the short answers' prompts share."""

WARM_SHARE: Final = 0.9
"""Steps count once so much of the requests meant to be in flight are."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of all calls of one step to the policy; mean, 99th percentile and maximum over many steps."""

    mean_s: float
    p99_s: float
    max_s: float


class TimedPolicy(AdmissionPolicy):
    """Passes every call on and adds up the time that it takes.

    It never says that it is quiet, so that it is asked in every step, as a real engine does.

    Attributes:
        spent_s: seconds since it was last set to 0.
    """

    name = "timed"

    def __init__(
        self, plan: Plan, limits: EngineLimits, inner: AdmissionPolicy, clock: Callable[[], float]
    ) -> None:
        """Takes the policy to time, which has the plan already, and seconds that only rise."""
        self._inner = inner
        self._clock = clock
        self.spent_s = 0.0

    @property
    def num_waiting(self) -> int:
        """As of the policy."""
        return self._inner.num_waiting

    def upcoming(self, num_requests: int) -> Sequence[int]:
        """As of the policy."""
        return self._inner.upcoming(num_requests)

    def begin_step(self, view: EngineView) -> int:
        """As of the policy."""
        return self._timed(self._inner.begin_step, view)

    def next_request(self, view: EngineView) -> Admission | None:
        """As of the policy."""
        return self._timed(self._inner.next_request, view)

    def admitted(self, seq: int, side: Side, num_cached_tokens: int) -> None:
        """As of the policy."""
        self._timed(self._inner.admitted, seq, side, num_cached_tokens)

    def decoding(self, seq: int) -> None:
        """As of the policy."""
        self._timed(self._inner.decoding, seq)

    def advanced(self, num_steps: int) -> None:
        """As of the policy."""
        self._timed(self._inner.advanced, num_steps)

    def prepare(self) -> None:
        """As of the policy."""
        self._timed(self._inner.prepare)

    def finished(self, seq: int, num_output_tokens: int) -> None:
        """As of the policy."""
        self._timed(self._inner.finished, seq, num_output_tokens)

    def preempted(self, seq: int) -> None:
        """As of the policy."""
        self._timed(self._inner.preempted, seq)

    def revise(self, plan: Plan) -> None:
        """As of the policy."""
        self._timed(self._inner.revise, plan)

    def _timed(self, call: Callable[..., _Answer], *arguments: Any) -> _Answer:
        started_s = self._clock()
        answer = call(*arguments)
        self.spent_s += self._clock() - started_s
        return answer


def run_policy_bench(
    seed: int, tell: Callable[[str], None], *, num_steps: int = NUM_STEPS
) -> dict[str, dict[int, StepCosts]]:
    """Measures every policy, in this process; those that look at lengths with hidden ones as well."""
    costs: dict[str, dict[int, StepCosts]] = {}
    for name in POLICY_NAMES:
        # To the others it is all one whether lengths are known.
        for is_hidden in (False, True) if name in LENGTH_AWARE_POLICIES else (False,):
            title = f"{name}, hidden" if is_hidden else name
            costs[title] = {}
            for num_in_flight in NUM_IN_FLIGHT:
                tell(f"{title}: {num_in_flight:,} in flight")
                costs[title][num_in_flight] = measure_policy(
                    name, num_in_flight, num_steps, seed, is_hidden=is_hidden
                )
    return costs


def measure_policy(
    name: str, num_in_flight: int, num_steps: int, seed: int, *, is_hidden: bool = False
) -> StepCosts:
    """Drives a policy with a simulated engine that is full, step by step."""
    target = study_target()
    model, device = target.model, target.device
    requests, num_output_tokens = _requests(num_in_flight, num_steps, seed)
    if is_hidden:
        requests = replace(
            requests,
            min_tokens=np.zeros(len(requests), dtype=np.int32),
            max_tokens=np.full(len(requests), HIDDEN_MAX_TOKENS, dtype=np.int32),
        )
    plan = build_plan(requests, model, device, PlanConfig(name, BLOCK_SIZE, seed))
    # Room for all of them at half their length, so that KV decides and never preempts much.
    mean_tokens = float((requests.num_prompt_tokens + num_output_tokens / 2) @ num_output_tokens)
    num_tokens = num_in_flight * mean_tokens / num_output_tokens.sum()
    limits = EngineLimits(
        BLOCK_SIZE,
        int(KV_ROOM_AHEAD.get(name, KV_ROOM) * num_tokens / BLOCK_SIZE),
        num_in_flight,
        num_in_flight + PREFILL_TOKENS,
    )
    policy = TimedPolicy(plan, limits, make_policy(name, plan, limits), time.perf_counter)
    stepper = Stepper(
        requests.seq.tolist(),
        PromptBlocks.of(requests, BLOCK_SIZE),
        num_output_tokens.tolist(),
        policy,
        model,
        device,
        limits,
        revision=plan.revision,
        overlap=True,
        started_at=0.0,
    )
    spent_s: list[float] = []
    gc.collect()
    # What the simulated engine holds is nothing that a policy's step should wait for to be looked through.
    gc.freeze()
    try:
        while not stepper.is_done and len(spent_s) < num_steps:
            policy.spent_s = 0.0
            stepper.advance()
            if stepper.num_running >= WARM_SHARE * num_in_flight:
                spent_s.append(policy.spent_s)
    finally:
        gc.unfreeze()
    if not spent_s:
        raise PlanError(f"{name} never had {num_in_flight:,} requests in flight; measure over more steps.")
    return StepCosts(float(np.mean(spent_s)), float(np.percentile(spent_s, 99)), max(spent_s))


def costs_json(costs: dict[str, dict[int, StepCosts]]) -> dict[str, Any]:
    """Returns what `--json` prints."""
    return {
        "policies": {
            name: {str(num_in_flight): asdict(cost) for num_in_flight, cost in by_number.items()}
            for name, by_number in costs.items()
        }
    }


def _requests(num_in_flight: int, num_steps: int, seed: int) -> tuple[SegmentRequests, npt.NDArray[np.int64]]:
    """Short answers behind one of `NUM_PREFIXES`, and as many long ones that share nothing.

    Enough for all the steps.
    """
    generator = np.random.default_rng(seed)
    num_requests = 3 * num_in_flight + 4 * num_steps
    is_long = generator.random(num_requests) < 0.5
    output = np.where(
        is_long,
        generator.integers(1_000, 3_000, num_requests),
        generator.integers(50, 200, num_requests),
    )
    number = np.arange(num_requests)
    group = np.where(is_long, NUM_PREFIXES + number, generator.integers(0, NUM_PREFIXES, num_requests))
    own = NUM_PREFIXES + num_requests + number
    tokens = np.stack((np.where(is_long, 64, 256), generator.integers(20, 200, num_requests)), axis=1)
    bound = output.astype(np.int32)
    requests = SegmentRequests(
        seq=number,
        segment_ids=np.stack((group, own), axis=1).ravel(),
        segment_tokens=tokens.ravel(),
        offsets=2 * np.arange(num_requests + 1),
        min_tokens=bound,
        max_tokens=bound,
    )
    return requests, output
