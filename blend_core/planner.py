"""From requests to a plan: estimate, order, and say what the order promises."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from blend_core.errors import ConfigurationError, PlanError
from blend_core.length_distribution import length_counts
from blend_core.length_groups import choose_group_samples, group_requests, mix_alike
from blend_core.length_priors import LengthPriors, no_priors
from blend_core.output_length import (
    OutputLengths,
    choose_samples,
    estimate_output_lengths,
    preset_lengths,
)
from blend_core.performance import (
    DEAR_PREFIX_STEPS,
    MAX_NUM_BATCHED_TOKENS,
    StepTimeModel,
    compute_density,
    compute_s,
    memory_s,
    practical_optimum_s,
)
from blend_core.plan import LengthGroup, Plan, PlanSummary, frozen
from blend_core.prefix_tree import PrefixTree, build_prefix_tree, without_leaves
from blend_core.prompt_set import PromptSet
from blend_core.specs import DeviceProfile, ModelSpec
from blend_core.transform import order_by_density

PLANNED_POLICIES: Final = ("fcfs", "dfs", "random", "dual_scan", "density_matched")
"""Policies that `build_plan` knows an order for."""

LENGTH_AWARE_POLICIES: Final = ("dual_scan", "density_matched")
"""Those of them that look at the lengths of answers, and take a plan from both of its ends."""


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """How to plan.

    Attributes:
        policy: one of `PLANNED_POLICIES`.
        block_size: tokens of a KV block of the engine that will run the plan.
        seed: of the random order and of the choice of samples.
        sample_fraction: share of the requests of hidden length that run first; 0 for none.
        sharing_kept: share of the achievable prefix sharing that the order for `dual_scan` keeps, 0 to 1.
        max_num_batched_tokens: tokens of one step at most, for the optimum in the summary.
    """

    policy: str
    block_size: int
    seed: int = 0
    sample_fraction: float = 0.01
    sharing_kept: float = 0.99
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS

    def __post_init__(self) -> None:
        if self.policy not in PLANNED_POLICIES:
            raise ConfigurationError(
                f"There is no policy {self.policy!r} to plan for; use one of {', '.join(PLANNED_POLICIES)}."
            )
        if self.block_size < 1:
            raise ConfigurationError("block_size must be at least 1; give the engine's.")
        if not (0 <= self.sample_fraction <= 1 and 0 <= self.sharing_kept <= 1):
            raise ConfigurationError("sample_fraction and sharing_kept are shares; give them from 0 to 1.")


def build_plan(
    requests: PromptSet,
    model: ModelSpec,
    device: DeviceProfile,
    config: PlanConfig,
    samples: Mapping[int, int] | None = None,
    revision: int = 0,
    priors: LengthPriors | None = None,
) -> Plan:
    """Plans the requests. Deterministic: rows in another order give the same plan, byte for byte.

    A request that `samples` names has its answer already: it informs the estimates of its neighbours in the
    tree and is not in the plan. So for a revision pass the unfinished requests together with the sampled
    ones; samples whose requests are left out count for the job as a whole only.

    Where lengths are hidden and there are no samples, a plan for `dual_scan` or `density_matched` marks the
    requests to sample as `lead`; they stay at their place in the order. Requests whose template earlier
    nights tell enough about (`LengthPriors.telling`) are estimated from those nights and never sampled. The
    plan is not simulated: `progress`, `planned_density` and `estimated_duration_s` are empty.

    Args:
        requests: prompts and bounds; not mutated.
        model: the model to plan for.
        device: the device to plan for.
        config: policy and options.
        samples: output tokens of finished requests by `seq`.
        revision: number of the plan.
        priors: what earlier nights tell, row by row of the requests.

    Raises:
        PlanError: there is nothing to plan.
    """
    tree = build_prefix_tree(requests, config.block_size)
    return plan_tree(requests, tree, model, device, config, samples, revision, priors=priors)


def plan_tree(
    requests: PromptSet,
    tree: PrefixTree,
    model: ModelSpec,
    device: DeviceProfile,
    config: PlanConfig,
    samples: Mapping[int, int] | None = None,
    revision: int = 0,
    lengths: OutputLengths | None = None,
    priors: LengthPriors | None = None,
) -> Plan:
    """Returns what `build_plan` does, from the requests' prefix tree at the configured block size.

    `lengths`, where given, are the estimates to plan with in place of those from bounds, samples and earlier
    nights.

    Raises:
        PlanError: there is nothing to plan.
    """
    priors = priors or no_priors(len(requests))
    if lengths is None:
        lengths = estimate_output_lengths(requests, tree, samples, priors)
    if samples:
        finished = np.isin(requests.seq, np.fromiter(samples.keys(), dtype=np.int64, count=len(samples)))
        whole, tree = tree, without_leaves(tree, requests, finished)
    else:
        whole = tree
    if len(tree) == 0:
        raise PlanError("No request is left to plan; there is nothing to run.")

    telling = priors.telling()
    group, length_groups = _length_groups(requests, whole, lengths, samples or {}, priors, telling)
    # The dual scan is the paper's: it knows mean lengths only. The estimates in the plan keep their spread.
    scanned = lengths.without_spread() if config.policy == "dual_scan" else lengths
    # Bound and template in one number: a bound has 31 bits.
    alike = np.where(group >= 0, requests.max_tokens + (telling + 1) * (1 << 31), -1)
    order = _planned_order(tree, scanned, alike, model, device, config)
    lead = np.zeros(len(requests), dtype=np.bool_)
    if not samples:
        is_hidden = ~lengths.known & (telling < 0)
        lead = np.isin(requests.seq, _samples(tree, is_hidden, group, config))

    prompt = requests.num_prompt_tokens[order]
    shared = requests.shared_with_previous(order, config.block_size)
    mean, second_moment = lengths.mean[order], lengths.second_moment[order]
    memory = memory_s(model, device, prompt, mean, scanned.second_moment[order])
    return Plan(
        revision=revision,
        policy=config.policy,
        summary=_summary(tree, lengths, model, device, shared, config.max_num_batched_tokens),
        seq=frozen(requests.seq[order]),
        num_prompt_tokens=frozen(prompt.astype(np.int32)),
        num_shared_tokens=frozen(shared.astype(np.int32)),
        max_tokens=frozen(requests.max_tokens[order]),
        estimated_output_tokens=frozen(mean),
        estimated_output_tokens_sq=frozen(second_moment),
        compute_s=frozen(compute_s(model, device, prompt, mean, shared)),
        memory_s=frozen(memory),
        lead=frozen(lead[order]),
        length_group=frozen(group[order].astype(np.int32)),
        length_groups=length_groups,
        step_times=StepTimeModel.of(model, device),
        progress=frozen(np.empty(0)),
        planned_density=frozen(np.empty(0)),
    )


def _length_groups(
    requests: PromptSet,
    tree: PrefixTree,
    lengths: OutputLengths,
    samples: Mapping[int, int],
    priors: LengthPriors,
    telling: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], tuple[LengthGroup, ...]]:
    """Returns the kind of each row, -1 where its length is preset or known, and what samples and earlier
    nights tell of kinds."""
    is_preset = preset_lengths(requests)
    group = group_requests(requests, tree, ~is_preset, telling)
    sampled = np.flatnonzero(np.isin(requests.seq, np.fromiter(samples, dtype=np.int64, count=len(samples))))
    observed: dict[int, list[int]] = {}
    for row in sampled.tolist():
        observed.setdefault(int(group[row]), []).append(max(1, samples[int(requests.seq[row])]))
    groups: list[LengthGroup] = []
    bounds = np.zeros(int(group.max(initial=-1)) + 1, dtype=np.int64)
    rows = np.flatnonzero(group >= 0)
    np.maximum.at(bounds, group[rows], requests.max_tokens[rows])
    templates = np.full(len(bounds), -1, dtype=np.int64)
    templates[group[rows]] = telling[rows]
    for number, (bound, template) in enumerate(zip(bounds.tolist(), templates.tolist(), strict=True)):
        counts = length_counts(observed.get(number, []))
        if template >= 0:
            counts += priors.templates[template].counts(bound)
        groups.append(
            LengthGroup(
                bound,
                tuple((place, float(counts[place])) for place in np.flatnonzero(counts).tolist()),
            )
        )
    group[lengths.known] = -1
    return group, tuple(groups)


def _samples(
    tree: PrefixTree,
    is_hidden: npt.NDArray[np.bool_],
    group: npt.NDArray[np.int64],
    config: PlanConfig,
) -> npt.NDArray[np.int64]:
    """Returns the seqs to run first, out of the rows of which nothing is known."""
    if config.policy == "dual_scan":
        return choose_samples(tree, is_hidden[tree.leaf_row], config.sample_fraction, config.seed)
    if config.policy == "density_matched":
        hidden_group = np.where(is_hidden, group, -1)[tree.leaf_row]
        dear_tokens = DEAR_PREFIX_STEPS * config.max_num_batched_tokens
        return choose_group_samples(tree, hidden_group, config.sample_fraction, config.seed, dear_tokens)
    return np.empty(0, dtype=np.int64)


def _planned_order(
    tree: PrefixTree,
    lengths: OutputLengths,
    alike: npt.NDArray[np.int64],
    model: ModelSpec,
    device: DeviceProfile,
    config: PlanConfig,
) -> npt.NDArray[np.int64]:
    """Returns the rows of the tree's leaves in planned order.

    `alike` numbers, row by row, requests that are the same as far as bound and earlier nights tell; below 0
    where the length is known.
    """
    if config.policy in LENGTH_AWARE_POLICIES:
        # Splits make the dual scan's two ends steeper; a policy that looks at every kind needs none.
        sharing_kept = config.sharing_kept if config.policy == "dual_scan" else 1.0
        order = tree.leaf_row[order_by_density(tree, lengths, model, device, sharing_kept)]
        if config.policy == "dual_scan":
            return order
        is_alone = np.zeros(len(alike), dtype=np.bool_)
        is_alone[tree.leaf_row] = tree.leaf_parent == 0
        return mix_alike(order, alike, is_alone, config.seed)
    if config.policy == "dfs":
        return tree.leaf_row
    by_seq = tree.leaf_row[np.argsort(tree.seq, kind="stable")]
    if config.policy == "random":
        return by_seq[np.random.default_rng(config.seed).permutation(len(by_seq))]
    return by_seq


def _summary(
    tree: PrefixTree,
    lengths: OutputLengths,
    model: ModelSpec,
    device: DeviceProfile,
    shared: npt.NDArray[np.int64],
    max_num_batched_tokens: int,
) -> PlanSummary:
    """Sums up in depth-first order, so that plans for every policy quote the same figures."""
    prompt = tree.num_prompt_tokens
    mean, second_moment = lengths.mean[tree.leaf_row], lengths.second_moment[tree.leaf_row]
    compute = float(compute_s(model, device, prompt, mean, tree.num_shared_tokens).sum())
    memory = float(memory_s(model, device, prompt, mean, second_moment).sum())
    num_prompt_tokens = int(prompt.sum())
    return PlanSummary(
        model=model.name,
        device=device.name,
        block_size=tree.block_size,
        num_requests=len(tree),
        num_prompt_tokens=num_prompt_tokens,
        estimated_output_tokens=float(mean.sum()),
        compute_s=compute,
        memory_s=memory,
        density=float(compute_density(compute, memory)),
        prefix_sharing_best=tree.total_shared_tokens / num_prompt_tokens,
        prefix_sharing_planned=int(shared.sum()) / num_prompt_tokens,
        optimum_s=practical_optimum_s(
            model, device, prompt, tree.num_shared_tokens, mean, second_moment, max_num_batched_tokens
        ),
    )
