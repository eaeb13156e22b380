"""Density-matched admission with an idea left out, and with one idea alone."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Final

from blend_core.policies.density_matched import DensityMatchedPolicy
from blend_core.policies.matching_rules import MatchingRules
from blend_core.simulator import PolicyMaker, SimulationResult
from blend_core.specs import DeviceProfile, ModelSpec
from blend_core.studies.dfs_ahead import DfsAheadPolicy
from blend_core.studies.study import run_policy
from blend_core.studies.workload import Workload


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run a workload.

    Attributes:
        planned: policy that the plan is made for.
        maker: what makes the policy that runs it; None where it is the one planned for.
    """

    planned: str
    maker: PolicyMaker | None = None


def _variants() -> Mapping[str, Variant]:
    names = [field.name for field in fields(MatchingRules)]
    none = MatchingRules(**dict.fromkeys(names, False))

    def matched(rules: MatchingRules) -> Variant:
        return Variant("density_matched", partial(DensityMatchedPolicy, rules=rules))

    return {
        "dfs": Variant("dfs"),
        "dfs with our admission": Variant("dfs", DfsAheadPolicy),
        "dual_scan": Variant("dual_scan"),
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
    return run_policy(workload, model, device, variant.planned, seed, variant.maker)
