"""Density-matched admission with an idea left out, and with one idea alone."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Final

from blend_core.planner import PlanConfig, build_plan
from blend_core.policies.density_matched import DensityMatchedPolicy
from blend_core.policies.matching_rules import MatchingRules
from blend_core.simulator import PolicyMaker, SimulationResult, simulate
from blend_core.specs import DeviceProfile, ModelSpec
from blend_core.studies.dfs_ahead import DfsAheadPolicy
from blend_core.studies.replanning import SampleReplanner
from blend_core.studies.study import BLOCK_SIZE, study_limits
from blend_core.studies.workload import Workload


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run a workload.

    Attributes:
        planned: policy that the plan is made for.
        policy: name or maker of the policy that runs it.
    """

    planned: str
    policy: str | PolicyMaker


def _variants() -> Mapping[str, Variant]:
    names = [field.name for field in fields(MatchingRules)]
    none = MatchingRules(**dict.fromkeys(names, False))

    def matched(rules: MatchingRules) -> Variant:
        return Variant("density_matched", partial(DensityMatchedPolicy, rules=rules))

    return {
        "dfs": Variant("dfs", "dfs"),
        "dfs with our admission": Variant("dfs", DfsAheadPolicy),
        "dual_scan": Variant("dual_scan", "dual_scan"),
        "density_matched": matched(MatchingRules()),
        **{f"without {name}": matched(replace(MatchingRules(), **{name: False})) for name in names},
        "no idea": matched(none),
        **{f"only {name}": matched(replace(none, **{name: True})) for name in names},
    }


VARIANTS: Final = _variants()
"""What is compared, by name."""


def run_variant(
    workload: Workload, model: ModelSpec, device: DeviceProfile, name: str, seed: int
) -> SimulationResult:
    """Plans and simulates a workload under a variant, in the setting of the studies. Deterministic."""
    variant = VARIANTS[name]
    config = PlanConfig(variant.planned, BLOCK_SIZE, seed)
    plan = build_plan(workload.requests, model, device, config)
    return simulate(
        workload.requests,
        workload.num_output_tokens,
        plan,
        variant.policy,
        model,
        device,
        study_limits(model, device),
        overlap=True,
        feedback=SampleReplanner(workload.requests, plan, model, device, config),
    )
