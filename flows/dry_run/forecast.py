"""The forecast of a dry run: what each policy takes, the optimum, densities, and replicas for a deadline."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from blend_core.plan import Plan, PlanSummary
from flows.dry_run.deadline import MAX_NUM_REPLICAS, replicas_for
from flows.dry_run.histogram import DensityBin, density_bins
from flows.dry_run.workload import Simulated, Workload

FORECAST_POLICIES: Final = ("density_matched", "dual_scan", "dfs", "fcfs", "random")


@dataclass(frozen=True, slots=True)
class PolicyForecast:
    """What a policy promises.

    Attributes:
        policy: its name.
        prefix_sharing: share of prompt tokens that neighbours in its order share.
        estimated_duration_s: simulated.
        fraction_of_optimum: the practical optimum over that duration.
        simulated_sharing: share of prompt tokens served from the cache, of those that were simulated.
        num_preempted: preemptions of those that were simulated.
        num_simulated: requests that were simulated; fewer than there are where a sample stands for all.
    """

    policy: str
    prefix_sharing: float
    estimated_duration_s: float
    fraction_of_optimum: float
    simulated_sharing: float
    num_preempted: int
    num_simulated: int


@dataclass(frozen=True, slots=True)
class DeadlineForecast:
    """Devices for a deadline.

    Attributes:
        deadline_s: what was asked for.
        policy: under which it is simulated.
        num_replicas: the smallest number of model replicas that was found to be in time; None where none was.
        num_devices: devices of all of them; None like the replicas.
        estimated_duration_s: simulated duration of the slowest replica; of the largest number tried where
            none is in time.
        max_num_replicas: the largest number that was tried or could have been.
        durations_s: of the slowest replica, by the numbers that were tried.
    """

    deadline_s: float
    policy: str
    num_replicas: int | None
    num_devices: int | None
    estimated_duration_s: float
    max_num_replicas: int
    durations_s: dict[int, float]


@dataclass(frozen=True, slots=True)
class Forecast:
    """A dry run of planning.

    Attributes:
        policy: the job's.
        summary: of the plan for that policy; what does not depend on the order holds for every policy. Its
            optimum is at the lengths that the simulation finds.
        policies: one entry per policy, in the order of `FORECAST_POLICIES`.
        density_bins: requests by their compute density.
        deadline: None where none was asked for.
    """

    policy: str
    summary: PlanSummary
    policies: tuple[PolicyForecast, ...]
    density_bins: tuple[DensityBin, ...]
    deadline: DeadlineForecast | None

    @property
    def expected(self) -> PolicyForecast:
        """The entry of the job's policy."""
        return next(entry for entry in self.policies if entry.policy == self.policy)


NOTABLY_FASTER: Final = 0.02
"""Share of its duration by which a policy must beat the job's to be worth a word."""


def faster_policy(told: Forecast) -> PolicyForecast | None:
    """Returns the fastest policy if it is notably faster than the job's."""
    fastest = min(told.policies, key=lambda entry: entry.estimated_duration_s)
    is_notable = fastest.estimated_duration_s < (1.0 - NOTABLY_FASTER) * told.expected.estimated_duration_s
    return fastest if is_notable else None


def forecast(
    workload: Workload, policy: str, deadline_s: float | None, on_progress: Callable[[str], None]
) -> Forecast:
    """Plans and simulates the requests under each policy.

    Args:
        workload: requests, answers and target.
        policy: of the job; the summary, the densities and the deadline are about it.
        deadline_s: to find the number of replicas for; None finds none.
        on_progress: told what is planned and how far its simulation is.
    """
    entries = []
    optimum_s = workload.optimum_s()
    for name in FORECAST_POLICIES:
        on_progress(f"planning for {name}")
        plan = workload.plan(name)
        simulated = workload.simulate(plan, _named(name, on_progress))
        entries.append(_entry(plan, simulated, optimum_s))
        if name == policy:
            chosen, expected_s = plan, entries[-1].estimated_duration_s
    deadline = None
    if deadline_s is not None:
        deadline = _deadline(workload, chosen, expected_s, deadline_s, on_progress)
    return Forecast(
        policy=policy,
        summary=replace(chosen.summary, estimated_duration_s=expected_s, optimum_s=optimum_s),
        policies=tuple(entries),
        density_bins=density_bins(chosen, workload.target),
        deadline=deadline,
    )


def _entry(plan: Plan, simulated: Simulated, optimum_s: float) -> PolicyForecast:
    return PolicyForecast(
        policy=plan.policy,
        prefix_sharing=plan.summary.prefix_sharing_planned,
        estimated_duration_s=simulated.duration_s,
        fraction_of_optimum=optimum_s / simulated.duration_s,
        simulated_sharing=simulated.prefix_sharing,
        num_preempted=simulated.num_preempted,
        num_simulated=simulated.num_simulated,
    )


def _deadline(
    workload: Workload,
    plan: Plan,
    expected_s: float,
    deadline_s: float,
    on_progress: Callable[[str], None],
) -> DeadlineForecast:
    most = min(MAX_NUM_REPLICAS, len(plan))

    def duration_of(num_replicas: int) -> float:
        if num_replicas == 1:
            return expected_s
        on_progress(f"planning for {num_replicas} replicas")
        named = _named(f"one of {num_replicas} replicas", on_progress)
        return workload.simulate_replicas(plan, num_replicas, named).duration_s

    found = replicas_for(deadline_s, duration_of, most)
    number = found.num_replicas
    return DeadlineForecast(
        deadline_s=deadline_s,
        policy=plan.policy,
        num_replicas=number,
        num_devices=None if number is None else number * workload.target.tensor_parallel,
        estimated_duration_s=found.durations_s[max(found.durations_s) if number is None else number],
        max_num_replicas=most,
        durations_s=found.durations_s,
    )


def _named(title: str, on_progress: Callable[[str], None]) -> Callable[[str], None]:
    """Says whose progress it is."""
    return lambda text: on_progress(f"{title}: {text}")
