"""Policies by name."""

from typing import Final

from blend_core.errors import ConfigurationError
from blend_core.plan import Plan
from blend_core.policies.base import AdmissionPolicy, EngineLimits
from blend_core.policies.density_matched import DensityMatchedPolicy
from blend_core.policies.dual_scan import DualScanPolicy
from blend_core.policies.in_order import DfsPolicy, FcfsPolicy, RandomPolicy

_POLICIES: Final[dict[str, type[AdmissionPolicy]]] = {
    policy.name: policy
    for policy in (FcfsPolicy, DfsPolicy, RandomPolicy, DualScanPolicy, DensityMatchedPolicy)
}

POLICY_NAMES: Final[tuple[str, ...]] = tuple(_POLICIES)


def make_policy(name: str, plan: Plan, limits: EngineLimits) -> AdmissionPolicy:
    """Makes the named policy over a plan.

    Raises:
        ConfigurationError: there is no policy of that name.
        PlanError: the plan was made for another block size.
    """
    policy = _POLICIES.get(name)
    if policy is None:
        raise ConfigurationError(f"There is no policy {name!r}; choose one of {', '.join(POLICY_NAMES)}.")
    return policy(plan, limits)
