"""The plan stage: a revision of the job's plan, simulated and stored."""

import time
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from blend_core.engines.base import RequestFailed
from blend_core.errors import RequestErrorCode
from blend_core.length_priors import LengthPriors
from blend_core.plan import Plan
from blend_core.planner import PlanConfig, build_plan
from blend_core.request import RequestArrays, longest_kv_tokens
from blend_core.simulator import simulate, with_simulation
from blend_core.wording import count_text, duration_text
from flows.stages.context import JobContext
from storage.output_lengths import load_length_priors
from storage.plans import next_revision, save_plan
from storage.recorder import Recorder
from storage.request_shards import open_request_shards
from storage.results import pending_seqs

GENERIC_PROFILE = "cpu"
"""The shipped profile of no CPU in particular: durations by it are rough."""

MAX_SIMULATED_REQUESTS = 50_000
"""About ten seconds of simulation. A larger plan is not simulated: no planned density, no duration."""


def plan_job(context: JobContext) -> str:
    """Plans what has no result yet as the job's first revision; returns the outcome in one line.

    A request that the whole KV cache cannot hold becomes an error row. A job that has a plan, or nothing to
    run, is left as it is.

    Raises:
        PlanError: the requests cannot be planned.
        StorageError: they cannot be read, or the plan cannot be stored.
    """
    database = context.wiring.database
    if next_revision(database, context.job_id) > 0:
        return "planned before"
    pending = pending_seqs(database, context.job_id)
    if len(pending) == 0:
        return "nothing to run"
    with open_request_shards(database, context.wiring.objects, context.job_id) as shards:
        requests = _refuse_too_large(context, shards.load_arrays(pending))
    if len(requests) == 0:
        return f"nothing to run: the KV cache is too small for all of {count_text(len(pending), 'request')}"
    priors = load_length_priors(database, context.job_id, context.spec.model, requests.seq)
    plan = plan_revision(context, requests, priors, samples={}, revision=0)
    num_refused = len(pending) - len(requests)
    summary = plan.summary
    # The plan's own figures are those of one rank.
    num_ranks = len(context.wiring.rank_devices(context.spec))
    duration = ""
    if summary.estimated_duration_s is not None:
        duration = f", about {duration_text(summary.estimated_duration_s / num_ranks)}"
        if context.wiring.settings.engine.device_profile == GENERIC_PROFILE:
            duration += " on the generic CPU profile (`blend profile` measures this machine)"
    num_known = int((priors.telling() >= 0).sum())
    ranks = "" if num_ranks == 1 else f" on {num_ranks} ranks"
    known = f", lengths of {num_known:,} known from earlier nights" if num_known else ""
    refused = f" ({num_refused:,} more are too large for the KV cache)" if num_refused else ""
    return (
        f"{count_text(summary.num_requests, 'request')}{refused}{known}{duration}, "
        f"optimum {duration_text(summary.optimum_s / num_ranks)}{ranks}, "
        f"density {summary.density:.2f}, prefix sharing {summary.prefix_sharing_planned:.0%} "
        f"of at best {summary.prefix_sharing_best:.0%}"
    )


def plan_revision(
    context: JobContext,
    requests: RequestArrays,
    priors: LengthPriors,
    *,
    samples: Mapping[int, int],
    revision: int,
) -> Plan:
    """Makes, simulates and stores one revision.

    Args:
        context: the run.
        requests: those without a result, and those of `samples`.
        priors: what earlier nights tell of them, row by row.
        samples: output tokens of finished requests by seq: what the estimates rest on.
        revision: its number.
    """
    wiring, options = context.wiring, context.spec.options
    model, device = wiring.model_spec(context.spec), wiring.device_profile()
    plan = build_plan(
        requests,
        model,
        device,
        PlanConfig(
            policy=options.policy.value,
            block_size=wiring.serving(context.spec).block_size,
            seed=options.seed,
            max_num_batched_tokens=wiring.settings.engine.max_num_batched_tokens,
        ),
        samples,
        revision,
        priors,
    )
    if len(plan) <= MAX_SIMULATED_REQUESTS:
        # Neither engine computes attention beside matrix products, so nothing overlaps.
        expected = simulate(
            requests,
            _expected_lengths(requests, plan),
            plan,
            plan.policy,
            model,
            device,
            wiring.engine_limits(context.spec, model),
            overlap=False,
        )
        plan = with_simulation(plan, expected)
    save_plan(wiring.database, wiring.objects, context.job_id, plan, run=context.run)
    return plan


def _refuse_too_large(context: JobContext, requests: RequestArrays) -> RequestArrays:
    """Gives requests that no order can fit into the KV cache an error row; returns the others."""
    wiring = context.wiring
    model = wiring.model_spec(context.spec)
    limits = wiring.engine_limits(context.spec, model)
    kv_setting = wiring.serving(context.spec).kv_setting
    capacity = limits.num_blocks * limits.block_size
    needed = longest_kv_tokens(requests.num_prompt_tokens, requests.max_tokens, model.max_model_len)
    too_large = needed > capacity
    if not too_large.any():
        return requests
    with Recorder(wiring.database, wiring.objects, context.run) as recorder:
        for row in np.flatnonzero(too_large).tolist():
            num_needed = count_text(int(needed[row]), "token")
            message = (
                f"A prompt of {count_text(int(requests.num_prompt_tokens[row]), 'token')} and max_tokens "
                f"of {int(requests.max_tokens[row]):,} need {num_needed} of KV cache, "
                f"which holds {capacity:,}; lower max_tokens, or raise {kv_setting}."
            )
            recorder.failed(
                RequestFailed(
                    int(requests.seq[row]), 0, RequestErrorCode.REQUEST_TOO_LARGE, message, time.time()
                )
            )
    return requests.take(np.flatnonzero(~too_large))


def _expected_lengths(requests: RequestArrays, plan: Plan) -> npt.NDArray[np.int64]:
    """`(num_requests,)` the plan's mean lengths as whole tokens, row by row of `requests`."""
    order = np.argsort(plan.seq)
    place = np.searchsorted(plan.seq, requests.seq, sorter=order)
    rows = order[np.minimum(place, len(plan) - 1)]
    # Samples are in `requests` and not in the plan; they do not run, so any length will do for them.
    return np.maximum(np.rint(plan.estimated_output_tokens[rows]), 1).astype(np.int64)
