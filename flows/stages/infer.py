"""The infer stage: one engine after another until every request of the plan has a result."""

import os
import time

from blend_core.engines.process import EngineProcess
from blend_core.errors import EngineDiedError, EngineError, PlanError
from blend_core.plan import Plan
from flows.device_file import device_file
from flows.device_lock import device_lock
from flows.job_source import pending_part
from flows.stages.context import JobContext
from flows.stages.engine_run import EngineRun
from flows.stages.parts import Part, next_part, set_culprits_aside
from flows.stages.restarts import RestartBudget, RestartRules
from storage.plans import load_plan
from storage.request_shards import RequestShards
from storage.results import counts
from storage.suspects import record_engine_death


def infer_job(context: JobContext) -> str:
    """Runs what has no result yet and records it; returns the outcome in one line.

    One engine at a time works on a device: this waits for an engine run of another job, whoever started it.

    An engine that dies, hangs, fails or runs out of memory is started again after a pause, and the death is
    written into the run's row. What was in flight then runs apart from all others, in groups that are halved
    at every death, until the request that kills engines is alone; after the second death alone it becomes an
    error row, and everything else has its answer. The engine is given up after too many deaths without an
    answer between them (`EngineSettings.max_restarts`). Returns early, with requests left, when the context
    is told to stop.

    Raises:
        EngineStartError: the engine did not come up.
        EngineDiedError: it died once too often; the next run goes on with the suspects.
        StaleRunError: another run took the job over.
        PlanError: the plan lacks a request.
        StorageError: results cannot be recorded.
    """
    wiring = context.wiring
    device = f"{os.uname().nodename}:{wiring.settings.engine.device}"
    with device_lock(
        wiring.database,
        device=device,
        job_id=context.job_id,
        stop=context.stop,
        waiting=context.progress.note,
    ) as held:
        if held:
            _run_on_device(context, device)
    standing = counts(wiring.database, context.job_id)
    return f"{standing.succeeded:,} succeeded, {standing.errored:,} errored, {standing.pending:,} left"


def _run_on_device(context: JobContext, device: str) -> None:
    wiring = context.wiring
    with (
        device_file(
            wiring.database.safe_url, device=device, stop=context.stop, waiting=context.progress.note
        ) as file,
        RequestShards(wiring.objects, context.job_id) as shards,
    ):
        if file is None:
            return
        engine = wiring.engine(context.spec, held_files=(file,))
        try:
            _run_until_done(context, shards, engine)
        finally:
            engine.close()


def _run_until_done(context: JobContext, shards: RequestShards, engine: EngineProcess) -> None:
    wiring = context.wiring
    settings = wiring.settings.engine
    budget = RestartBudget(RestartRules(settings.max_restarts, settings.restart_delay_s))
    num_windows = 0
    while context.stop.reason is None:
        _set_aside(context)
        part = next_part(context)
        if part is None:
            return
        plan, wanted = _planned(context, part)
        engine_run = EngineRun(context, shards, plan, wanted, num_windows, may_replan=not part.is_suspect)
        try:
            engine_run.run(engine)
        except EngineDiedError as error:
            engine.close()
            if context.stop.reason is None:
                _take_death(context, engine_run, error, budget)
        else:
            _check_nothing_left(context, engine_run)
        num_windows = engine_run.num_windows


def _planned(context: JobContext, part: Part) -> tuple[Plan, Plan]:
    """The latest revision of the plan, and what of it is the part."""
    wiring = context.wiring
    plan = load_plan(wiring.database, wiring.objects, context.job_id)
    wanted = pending_part(plan, part.seqs)
    if len(wanted) < len(part.seqs):
        raise PlanError(
            f"Revision {plan.revision} of the plan of job {context.job_id} lacks "
            f"{len(part.seqs) - len(wanted)} requests that have no result; report this.",
            job_id=context.job_id,
        )
    return plan, wanted


def _set_aside(context: JobContext) -> None:
    for seq in set_culprits_aside(context, time.time()):
        context.progress.note(f"Request {seq} is set aside: the engine died of it, alone and twice.")


def _take_death(
    context: JobContext, engine_run: EngineRun, error: EngineDiedError, budget: RestartBudget
) -> None:
    """Writes a death down and waits before the next start. Raises the error when there is to be none."""
    in_flight = list(engine_run.in_flight)
    record_engine_death(context.wiring.database, context.run, str(error), in_flight)
    if engine_run.num_answers:
        budget.answered()
    delay_s = budget.died()
    if delay_s is None:
        raise EngineDiedError(
            f"The engine died {budget.num_deaths} times in a row and gave no answer in between; it is given "
            f"up. The last time: {error}",
            job_id=context.job_id,
        ) from error
    context.progress.note(
        f"{error} Starting it again in {delay_s:.0f} s (death {budget.num_deaths} in a row); "
        f"{len(in_flight)} requests were in flight and run apart from the others."
    )
    context.stop.wait(delay_s)


def _check_nothing_left(context: JobContext, engine_run: EngineRun) -> None:
    """An engine that ends in peace has ended every request, unless it was told to stop."""
    if engine_run.num_open and context.stop.reason is None:
        raise EngineError(
            f"The engine ended and left {engine_run.num_open} requests of job {context.job_id} without a "
            "result; run the job again, and report this if it stays so.",
            job_id=context.job_id,
        )
