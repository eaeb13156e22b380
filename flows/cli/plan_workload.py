"""What `blend plan` simulates: the requests on their target, and how long answers are taken to be."""

from collections.abc import Callable

import numpy as np

from blend_core.errors import PlanError
from blend_core.output_length import preset_lengths
from blend_core.prefix_tree import PrefixTree, build_prefix_tree
from blend_core.request import RequestArrays
from blend_core.specs import DeviceProfile
from flows.cli.plan_source import PlanInput
from flows.dry_run.lengths import (
    AnswerLengths,
    lengths_by_bounds,
    lengths_by_earlier_nights,
    lengths_by_mean,
    lengths_by_record,
)
from flows.dry_run.target import own_target, target_of
from flows.dry_run.workload import QUICK, SimulationSize, Workload, requests_that_fit
from flows.settings import Settings


def workload_of(
    asked: PlanInput,
    settings: Settings,
    profile: DeviceProfile,
    *,
    is_own_engine: bool,
    expected_output_tokens: int | None,
    overlap: bool,
    quick: bool,
    on_progress: Callable[[str], None],
) -> Workload:
    """Returns the requests that fit, with what runs them.

    Args:
        asked: what is planned.
        settings: of this installation.
        profile: of a device.
        is_own_engine: plan for this installation's engine; otherwise for whole devices of that profile.
        expected_output_tokens: mean length of the answers; None goes by what is known.
        overlap: whether the engine runs decode attention beside compute.
        quick: simulate less.
        on_progress: told before what takes long.

    Raises:
        ConfigurationError: the model does not fit the device.
        PlanError: no request fits, or there is none.
    """
    if len(asked.requests) == 0:
        raise PlanError(
            "No line holds a request that can be planned; `blend validate --model NAME` names each fault."
            if asked.num_bad
            else "There is no line and no row to plan; give the source a request in each."
        )
    target = (
        own_target(asked.model, profile, asked.serving)
        if is_own_engine
        else target_of(asked.model, profile, settings.engine.block_size)
    )
    requests = requests_that_fit(asked.requests, target)
    on_progress(f"building the prefix tree of {len(requests):,} prompts")
    tree = build_prefix_tree(requests, target.limits.block_size)
    return Workload(
        requests,
        tree,
        _answer_lengths(asked, requests, tree, expected_output_tokens),
        target,
        overlap=overlap,
        size=QUICK if quick else SimulationSize(),
        num_refused=len(asked.requests) - len(requests),
    )


def _answer_lengths(
    asked: PlanInput, requests: RequestArrays, tree: PrefixTree, expected_output_tokens: int | None
) -> AnswerLengths:
    """Returns the lengths by the best that is known; drawn alike in each run."""
    rng = np.random.default_rng(0)
    priors = asked.priors.take(np.searchsorted(asked.requests.seq, requests.seq))
    if expected_output_tokens is not None:
        return lengths_by_mean(requests, expected_output_tokens, rng)
    if asked.recorded:
        return lengths_by_record(requests, tree, asked.recorded, rng)
    if ((priors.telling() >= 0) & ~preset_lengths(requests)).any():
        return lengths_by_earlier_nights(requests, tree, priors, rng)
    return lengths_by_bounds(requests, tree, rng)
