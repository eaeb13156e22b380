"""The infer stage: the ranks of a run work until every request of the plan has a result."""

import os
from collections.abc import Sequence
from contextlib import ExitStack

from blend_core.engines.process import EngineProcess
from blend_core.errors import EngineStartError, PlanError
from flows.device_file import device_file
from flows.device_lock import device_lock
from flows.job_source import pending_part
from flows.rank_devices import locked_devices
from flows.stages.context import JobContext
from flows.stages.engine_run import SharedParts
from flows.stages.lease_heartbeat import lease_heartbeat
from flows.stages.rank import Rank
from flows.stages.replan import Replanner
from flows.stages.shared_plan import SharedPlan
from storage.plans import load_plan
from storage.recorder import Recorder
from storage.request_shards import open_request_shards
from storage.results import counts, pending_seqs
from storage.run_rows import next_batch_indexes
from storage.runs import WAITS_FOR, set_run_details
from storage.shards import forget_shards


def infer_job(context: JobContext) -> str:
    """Runs what has no result yet and records it; returns the outcome in one line.

    Every rank of the job has an engine of its own. One run at a time works on a device: this waits for the
    engines of another job, whoever started them.

    An engine that dies, hangs, fails or runs out of memory is started again after a pause, and the death is
    written into the run's row. What was in flight then runs apart from all others, in groups that are halved
    at every death, until the request that kills engines is alone; after the second death alone it becomes an
    error row, and everything else has its answer. A rank is given up after too many deaths without an answer
    between them (`EngineSettings.max_restarts`); the others run what it held. Returns early, with requests
    left, when the context is told to stop.

    Raises:
        EngineStartError: no engine came up.
        EngineDiedError: the last one died once too often; the next run goes on with the suspects.
        StaleRunError: another run took the job over.
        PlanError: the plan lacks a request.
        StorageError: results cannot be recorded.
    """
    wiring = context.wiring
    devices = wiring.rank_devices(context.spec)
    with ExitStack() as held:
        files = hold_devices(context, devices, held)
        if files is not None:
            engines = [
                wiring.engine(context.spec, rank, devices, held_files=files) for rank in range(len(devices))
            ]
            try:
                _run_ranks(context, engines)
            except EngineStartError as error:
                raise _with_own_options(error, context) from error
    standing = counts(wiring.database, context.job_id)
    return f"{standing.succeeded:,} succeeded, {standing.errored:,} errored, {standing.pending:,} left"


def _with_own_options(error: EngineStartError, context: JobContext) -> EngineStartError:
    """The error, with what can be done where options of the job's own may be at fault.

    What this machine sets can be mended and the job continued; what the job brings cannot be changed. Which
    of them vLLM refused only its own words tell, and it may have been the device, so the job does not fail.
    """
    names = ", ".join(context.spec.options.vllm)
    if not names:
        return error
    return EngineStartError(
        f"{error.message} The job's own vLLM options ({names}) stay as they were submitted: if one of them "
        f"is at fault, end the job with `blend cancel {context.job_id}` and make a new one.",
        **error.ids,
    )


def hold_devices(context: JobContext, devices: Sequence[str], held: ExitStack) -> list[int] | None:
    """Locks every device, in one order for all runs; the files to hand to engines, None when told to stop.

    What it waits for is told, and stands in the run's details as long as it waits.
    """
    database, files = context.wiring.database, []
    waits: list[str] = []

    def waiting(sentence: str) -> None:
        waits.append(sentence)
        context.progress.note(sentence)
        set_run_details(database, context.run, {WAITS_FOR: sentence})

    names = locked_devices(devices, context.wiring.settings.visible_gpus)
    for device in (f"{os.uname().nodename}:{name}" for name in names):
        lock = device_lock(
            database,
            device=device,
            job_id=context.job_id,
            stop=context.stop,
            waiting=waiting,
        )
        if not held.enter_context(lock):
            return None
        file = held.enter_context(
            device_file(database.safe_url, device=device, stop=context.stop, waiting=waiting)
        )
        if file is None:
            return None
        files.append(file)
    if waits:
        set_run_details(database, context.run, {WAITS_FOR: ""})
    return files


def _run_ranks(context: JobContext, engines: Sequence[EngineProcess]) -> None:
    wiring, run = context.wiring, context.run
    forget_shards(wiring.database, run)
    pending = pending_seqs(wiring.database, context.job_id)
    if len(pending) == 0:
        return
    plan = load_plan(wiring.database, wiring.objects, context.job_id)
    wanted = pending_part(plan, pending)
    if len(wanted) < len(pending):
        raise PlanError(
            f"Revision {plan.revision} of the plan of job {context.job_id} lacks "
            f"{len(pending) - len(wanted)} requests that have no result; report this.",
            job_id=context.job_id,
        )
    with (
        open_request_shards(wiring.database, wiring.objects, context.job_id) as requests,
        Recorder(wiring.database, wiring.objects, run) as recorder,
        Replanner(context, requests, plan, wanted) as replanner,
    ):
        shared = SharedPlan(context, recorder, replanner, plan, wanted, len(engines))
        parts = SharedParts(shared, requests, recorder)
        first_windows = next_batch_indexes(wiring.database, run)
        ranks = [
            Rank(context, number, engine, parts, first_windows.get(number, 0))
            for number, engine in enumerate(engines)
        ]
        with lease_heartbeat(wiring.database, run, shared):
            _run_together(context, shared, ranks, engines)
    forget_shards(wiring.database, run)


def _run_together(
    context: JobContext, shared: SharedPlan, ranks: Sequence[Rank], engines: Sequence[EngineProcess]
) -> None:
    try:
        if len(ranks) == 1:
            ranks[0].run()
        else:
            context.run_together({f"infer, rank {number}": rank.run for number, rank in enumerate(ranks)})
    except BaseException as error:
        # Ranks that still run, in threads of their own, must not start an engine again.
        shared.fail(error)
        raise
    finally:
        for engine in engines:
            engine.close()
