"""The plan stage: a revision of the job's plan, simulated and stored."""

from collections.abc import Mapping, Sequence

import numpy as np

from blend_core.plan import Plan
from blend_core.planner import PlanConfig, build_plan
from flows.stages.context import JobContext
from storage.plans import next_revision, save_plan
from storage.results import pending_seqs


def plan_job(context: JobContext) -> str:
    """Plans what has no result yet as the job's first revision; returns the outcome in one line.

    A job that has a plan, or nothing to run, is left as it is.

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
    plan = plan_revision(context, pending.tolist(), samples={}, revision=0)
    summary = plan.summary
    duration = (
        "" if summary.estimated_duration_s is None else f", about {summary.estimated_duration_s:,.0f} s"
    )
    return (
        f"{summary.num_requests:,} requests{duration}, optimum {summary.optimum_s:,.0f} s, "
        f"density {summary.density:.2f}, prefix sharing {summary.prefix_sharing_planned:.0%} "
        f"of at best {summary.prefix_sharing_best:.0%}"
    )


def plan_revision(
    context: JobContext, pending: Sequence[int], *, samples: Mapping[int, int], revision: int
) -> Plan:
    """Makes, simulates and stores one revision.

    Args:
        context: the run.
        pending: seqs without a result.
        samples: output tokens of finished requests by seq: what the estimates rest on.
        revision: its number.
    """
    wiring, options = context.wiring, context.spec.options
    model, device = wiring.model_spec(context.spec.model), wiring.device_profile()
    named = np.union1d(
        np.asarray(pending, dtype=np.int64), np.fromiter(samples, dtype=np.int64, count=len(samples))
    )
    plan = build_plan(
        context.requests.load_arrays(named),
        model,
        device,
        PlanConfig(
            policy=options.policy.value, block_size=wiring.settings.engine.block_size, seed=options.seed
        ),
        samples,
        revision,
    )
    save_plan(wiring.database, wiring.objects, context.job_id, plan, run_id=context.run.run_id)
    return plan
