"""Simulates a plan: the same policies as in production, over a device profile instead of a device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from blend_core.engines.base import StepWindow
from blend_core.errors import PlanError
from blend_core.plan import Plan, frozen
from blend_core.policies.base import AdmissionPolicy, EngineLimits
from blend_core.policies.factory import make_policy
from blend_core.simulation.prompts import PromptBlocks, Prompts
from blend_core.simulation.stepper import SimulatedEnd, Stepper
from blend_core.specs import DeviceProfile, ModelSpec

PolicyMaker = Callable[[Plan, EngineLimits], AdmissionPolicy]

NUM_PROGRESS_POINTS: Final = 200
"""Points of a plan's `progress` curve at most."""


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    """What a simulated run took.

    Attributes:
        policy: name of the policy that ran.
        duration_s: simulated seconds from the first step to the last.
        sequential_s: seconds that the same steps take where decode attention runs after compute.
        windows: the run in windows of steps, in order.
        num_prompt_tokens: prompt tokens of the requests that were answered.
        num_output_tokens: output tokens of them.
        num_cached_tokens: prompt tokens served from the cache at first admissions.
        num_refused: requests without an answer, since they need more KV than there is.
    """

    policy: str
    duration_s: float
    sequential_s: float
    windows: tuple[StepWindow, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_refused: int

    @property
    def num_steps(self) -> int:
        """Forward passes."""
        return sum(window.num_steps for window in self.windows)

    @property
    def compute_s(self) -> float:
        """Seconds of compute at the device's peak, recomputation included."""
        return sum(window.compute_s for window in self.windows)

    @property
    def memory_s(self) -> float:
        """Seconds of KV reading at the device's peak."""
        return sum(window.memory_s for window in self.windows)

    @property
    def prefix_sharing(self) -> float:
        """Share of prompt tokens served from the cache, recomputation after preemption left out."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def num_preempted(self) -> int:
        """Preemptions."""
        return sum(window.num_preempted for window in self.windows)

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens computed again after a preemption."""
        return sum(window.num_recomputed_tokens for window in self.windows)

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens per simulated second: the paper's throughput."""
        num_tokens = self.num_prompt_tokens + self.num_output_tokens
        return num_tokens / self.duration_s if self.duration_s > 0 else 0.0


class RunFeedback(Protocol):
    """Whoever watches a simulated run and may plan the rest of it anew."""

    def ended(self, seq: int, num_output_tokens: int) -> None:
        """A request ended, with that many output tokens; 0 where it has no answer, since it does not fit."""

    def revision(self) -> Plan | None:
        """A later plan than the last one handed out, or None. Cheap: asked after every jump of the run."""


def simulate(
    requests: Prompts,
    output_tokens: npt.ArrayLike,
    plan: Plan,
    policy: str | PolicyMaker,
    model: ModelSpec,
    device: DeviceProfile,
    limits: EngineLimits,
    *,
    overlap: bool,
    feedback: RunFeedback | None = None,
) -> SimulationResult:
    """Runs a plan on a simulated engine: chunked prefill, prefix cache, preemption by recomputation.

    Deterministic. Requests that the plan does not name do not run.

    Args:
        requests: the prompts; they decide what the prefix cache holds.
        output_tokens: `(num_requests,)` true lengths of the answers, row by row of `requests`; hidden from
            the policy.
        plan: order and estimates.
        policy: one of `POLICY_NAMES`, or what makes another policy of the plan.
        model: what runs.
        device: on what.
        limits: KV blocks and batch bounds.
        overlap: whether decode attention runs beside compute.
        feedback: told of what ends, and asked for revisions of the plan.

    Raises:
        ConfigurationError: there is no policy of that name.
        PlanError: the plan was made for another block size, or names a request that is not in `requests`.
    """
    if not np.isin(plan.seq, requests.seq).all():
        raise PlanError(
            "The plan names requests that were not given; simulate it with those it was built from."
        )
    admission = make_policy(policy, plan, limits) if isinstance(policy, str) else policy(plan, limits)
    seqs = requests.seq.tolist()
    stepper = Stepper(
        seqs,
        PromptBlocks.of(requests, limits.block_size),
        np.asarray(output_tokens, dtype=np.int64).tolist(),
        admission,
        model,
        device,
        limits,
        revision=plan.revision,
        overlap=overlap,
        started_at=0.0,
    )
    windows: list[StepWindow] = []
    ends: list[SimulatedEnd] = []
    while not stepper.is_done:
        for event in stepper.advance():
            if isinstance(event, SimulatedEnd):
                ends.append(event)
                if feedback is not None:
                    feedback.ended(seqs[event.row], event.num_output_tokens if event.fits else 0)
            else:
                windows.append(event)
        revised = feedback.revision() if feedback is not None else None
        if revised is not None:
            window = stepper.revise(revised)
            if window is not None:
                windows.append(window)
    last_window = stepper.flush()
    if last_window is not None:
        windows.append(last_window)
    answered = [end for end in ends if end.fits]
    num_prompt_tokens = requests.num_prompt_tokens
    return SimulationResult(
        policy=admission.name,
        duration_s=stepper.now,
        sequential_s=stepper.sequential_s,
        windows=tuple(windows),
        num_prompt_tokens=int(num_prompt_tokens[[end.row for end in answered]].sum()),
        num_output_tokens=sum(end.num_output_tokens for end in answered),
        num_cached_tokens=sum(end.num_cached_tokens for end in answered),
        num_refused=len(ends) - len(answered),
    )


def with_simulation(plan: Plan, result: SimulationResult) -> Plan:
    """Returns the plan with its simulated duration and the density of its batches as work gets done."""
    progress, density = _density_curve(result.windows)
    return replace(
        plan,
        summary=replace(plan.summary, estimated_duration_s=result.duration_s),
        progress=progress,
        planned_density=density,
    )


def _density_curve(
    windows: Sequence[StepWindow],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Density over the share of `compute_s + memory_s`, in equal shares with a point in the middle of each.

    Both ends repeat the point next to them, so that the curve covers 0 to 1.
    """
    compute = np.cumsum([0.0, *(window.compute_s for window in windows)])
    memory = np.cumsum([0.0, *(window.memory_s for window in windows)])
    total = compute[-1] + memory[-1]
    if memory[-1] <= 0:
        empty = frozen(np.zeros(0, dtype=np.float64))
        return empty, empty
    share = (compute + memory) / total
    num_points = min(NUM_PROGRESS_POINTS, len(windows))
    edges = np.linspace(0.0, 1.0, num_points + 1)
    compute_s = np.diff(np.interp(edges, share, compute))
    memory_s = np.diff(np.interp(edges, share, memory))
    is_read = memory_s > 0
    density = compute_s[is_read] / memory_s[is_read]
    middle = ((edges[:-1] + edges[1:]) / 2)[is_read]
    progress = np.concatenate([[0.0], middle, [1.0]])
    planned_density = np.concatenate([density[:1], density, density[-1:]])
    return frozen(progress), frozen(planned_density)
