"""One workload under every policy of a study, simulated in the setting that published figures compare by."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from blend_core.engines.base import StepWindow
from blend_core.performance import MAX_NUM_BATCHED_TOKENS, num_kv_blocks
from blend_core.planner import PlanConfig, build_plan
from blend_core.policies.base import EngineLimits
from blend_core.simulator import PolicyMaker, SimulationResult, simulate
from blend_core.specs import DeviceProfile, ModelSpec
from blend_core.studies.replanning import SampleReplanner
from blend_core.studies.workload import Workload, WorkloadFigures, workload_figures

STUDY_POLICIES: Final = ("dfs_sequential", "dfs", "random", "dual_scan", "density_matched")
"""What is compared: vLLM-DFS and SGLang-DFS; NanoFlow-DFS; NanoFlow-Balance; BlendServe; ours."""

BASELINES: Final = ("dfs_sequential", "dfs", "random")
"""Those of them that estimate nothing, so that it is all one whether lengths are preset or hidden."""

BLOCK_SIZE: Final = 16
"""Tokens of a KV block."""

MAX_NUM_SEQS: Final = 4_096
"""Requests in flight at most: more than ever fit, so that KV alone decides."""

NUM_TIMELINE_POINTS: Final = 240
"""Points of a time line."""


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """What a workload took under one policy; after `mean`, means over seeds.

    Attributes:
        duration_s: simulated seconds.
        fraction_of_optimum: practical optimum by duration.
        sharing_kept: share of the achievable prefix sharing that was reached.
        num_steps: forward passes.
        num_preempted: preemptions.
        compute_s: seconds of compute at peak figures, recomputation included.
        memory_s: seconds of KV reading at peak figures.
    """

    duration_s: float
    fraction_of_optimum: float
    sharing_kept: float
    num_steps: float
    num_preempted: float
    compute_s: float
    memory_s: float

    @classmethod
    def mean(cls, runs: Sequence["PolicyRun"]) -> "PolicyRun":
        """Returns the mean of every field."""
        return cls(*(float(np.mean([getattr(run, field.name) for run in runs])) for field in fields(cls)))


@dataclass(frozen=True, slots=True)
class Timeline:
    """How busy a run was; all lists are `(num_points,)`.

    Attributes:
        time_s: middle of each stretch of the run.
        compute: share of the stretch that its compute takes at peak figures.
        memory: share of the stretch that its KV reading takes at peak figures.
        kv_usage: mean share of KV in use.
    """

    time_s: list[float]
    compute: list[float]
    memory: list[float]
    kv_usage: list[float]


@dataclass(frozen=True, slots=True)
class WorkloadRun:
    """A workload under every policy.

    Attributes:
        name: the workload's name.
        length_set: `preset` where some output lengths are known beforehand, else `hidden`.
        density: compute density at peak figures, shared segments once.
        prefix_sharing: achievable share of prompt tokens from the cache.
        num_requests: requests; a mean after `mean_over_seeds`.
        optimum_s: the practical optimum.
        policies: runs by policy.
        timelines: by policy; those of the first seed after `mean_over_seeds`.
    """

    name: str
    length_set: str
    density: float
    prefix_sharing: float
    num_requests: float
    optimum_s: float
    policies: dict[str, PolicyRun]
    timelines: dict[str, Timeline]


def study_limits(model: ModelSpec, device: DeviceProfile) -> EngineLimits:
    """Returns the limits of the studies: all of the device's KV, 2,048 batched tokens."""
    num_blocks = num_kv_blocks(model, device.kv_capacity_bytes, BLOCK_SIZE)
    return EngineLimits(BLOCK_SIZE, num_blocks, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)


def run_workload(
    workload: Workload,
    model: ModelSpec,
    device: DeviceProfile,
    seed: int,
    *,
    policies: Sequence[str] = STUDY_POLICIES,
    known: WorkloadRun | None = None,
    told: Callable[[str], None] = lambda text: None,
) -> WorkloadRun:
    """Simulates a workload under each policy. Deterministic.

    A policy without estimates does not look at the time, so `dfs_sequential` takes the same steps as `dfs`
    and is not simulated twice.

    Args:
        workload: requests and true lengths; only the simulator sees the latter.
        model: what runs.
        device: on what.
        seed: of the random order and of the choice of samples.
        policies: some of `STUDY_POLICIES`.
        known: a run of the same requests whose baselines are taken over.
        told: hears what is being simulated.
    """
    requests = workload.requests
    figures = workload_figures(requests, workload.num_output_tokens, model, device, BLOCK_SIZE)
    runs: dict[str, PolicyRun] = {}
    timelines: dict[str, Timeline] = {}
    for name in policies:
        if name in runs:
            continue
        if known is not None and name in BASELINES and name in known.policies:
            runs[name] = known.policies[name]
            if name in known.timelines:
                timelines[name] = known.timelines[name]
            continue
        told(f"{workload.name}: {name}")
        planned = "dfs" if name == "dfs_sequential" else name
        result = run_policy(workload, model, device, planned, seed)
        if planned == "dfs":
            if "dfs_sequential" in policies:
                runs["dfs_sequential"] = _policy_run(result, figures, result.sequential_s)
            if "dfs" in policies:
                runs["dfs"] = _policy_run(result, figures, result.duration_s)
        else:
            runs[planned] = _policy_run(result, figures, result.duration_s)
        timelines[planned] = timeline(result.windows)
    return WorkloadRun(
        name=workload.name,
        length_set="preset" if np.any(requests.min_tokens == requests.max_tokens) else "hidden",
        density=figures.density,
        prefix_sharing=figures.prefix_sharing,
        num_requests=len(requests),
        optimum_s=figures.optimum_s,
        policies={name: runs[name] for name in policies},
        timelines=timelines,
    )


def run_policy(
    workload: Workload,
    model: ModelSpec,
    device: DeviceProfile,
    planned: str,
    seed: int,
    maker: PolicyMaker | None = None,
) -> SimulationResult:
    """Plans a workload for a policy and simulates it on an overlap engine, samples and revision included.

    Deterministic. `maker` makes the policy that runs the plan; without one it is the policy planned for.
    """
    requests, config = workload.requests, PlanConfig(planned, BLOCK_SIZE, seed)
    plan = build_plan(requests, model, device, config)
    return simulate(
        requests,
        workload.num_output_tokens,
        plan,
        maker or planned,
        model,
        device,
        study_limits(model, device),
        overlap=True,
        feedback=SampleReplanner(requests, plan, model, device, config),
    )


def mean_over_seeds(runs: Sequence[WorkloadRun]) -> WorkloadRun:
    """Returns the means of runs of one workload that differ in their seed."""
    first = runs[0]
    return WorkloadRun(
        name=first.name,
        length_set=first.length_set,
        density=float(np.mean([run.density for run in runs])),
        prefix_sharing=float(np.mean([run.prefix_sharing for run in runs])),
        num_requests=float(np.mean([run.num_requests for run in runs])),
        optimum_s=float(np.mean([run.optimum_s for run in runs])),
        policies={name: PolicyRun.mean([run.policies[name] for run in runs]) for name in first.policies},
        timelines=first.timelines,
    )


def speedup(policies: Mapping[str, PolicyRun], name: str, over: str) -> float:
    """Returns how many times as fast a policy is as another."""
    return policies[over].duration_s / policies[name].duration_s


def timeline(windows: Sequence[StepWindow]) -> Timeline:
    """Sums a run up in stretches of equal time."""
    started = np.array([window.started_at for window in windows])
    duration = np.array([window.duration_s for window in windows])
    total = float(started[-1] + duration[-1])
    num_points = min(NUM_TIMELINE_POINTS, len(windows))
    edges = np.linspace(0.0, total, num_points + 1)

    def spread(values: Sequence[float]) -> list[float]:
        done = np.concatenate(([0.0], np.cumsum(values)))
        at = np.interp(edges, np.append(started, total), done)
        rates: list[float] = (np.diff(at) / np.diff(edges)).tolist()
        return rates

    return Timeline(
        time_s=((edges[:-1] + edges[1:]) / 2).tolist(),
        compute=spread([window.compute_s for window in windows]),
        memory=spread([window.memory_s for window in windows]),
        kv_usage=spread([window.kv_usage * window.duration_s for window in windows]),
    )


def _policy_run(result: SimulationResult, figures: WorkloadFigures, duration_s: float) -> PolicyRun:
    best = figures.prefix_sharing
    return PolicyRun(
        duration_s=duration_s,
        fraction_of_optimum=figures.optimum_s / duration_s,
        sharing_kept=result.prefix_sharing / best if best > 0 else 1.0,
        num_steps=result.num_steps,
        num_preempted=result.num_preempted,
        compute_s=result.compute_s,
        memory_s=result.memory_s,
    )
