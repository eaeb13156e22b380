"""A rank: one engine after another on a device, until what it holds of the plan has ended."""

import time

from blend_core.engines.process import EngineProcess
from blend_core.errors import EngineDiedError, EngineError, EngineStartError
from flows.stages.context import JobContext
from flows.stages.engine_run import EngineRun, SharedParts
from flows.stages.parts import next_part, set_culprits_aside
from flows.stages.restarts import RestartBudget, RestartRules
from storage.suspects import record_engine_death

IDLE_POLL_S = 0.5
EXPIRY_POLL_S = 15.0


class Rank:
    """One model replica of a run.

    An engine that dies, hangs, fails or runs out of memory is started again after a pause. What was in flight
    runs apart from all others, in groups that are halved at every death. After too many deaths without an
    answer between them the rank is given up and the others take what it held; the last one ends the run.
    """

    __slots__ = ("_budget", "_context", "_engine", "_num_windows", "_number", "_shared")

    def __init__(self, context: JobContext, number: int, engine: EngineProcess, shared: SharedParts) -> None:
        """Takes the rank's number, from 0, and its engine, which is not started yet."""
        settings = context.wiring.settings.engine
        self._context = context
        self._number = number
        self._engine = engine
        self._shared = shared
        self._budget = RestartBudget(RestartRules(settings.max_restarts, settings.restart_delay_s))
        self._num_windows = 0

    def run(self) -> None:
        """Runs until every request of all ranks has ended, or the run is told to stop.

        Raises:
            EngineStartError: the engine did not come up, and no other rank is left.
            EngineDiedError: it died once too often, and no other rank is left.
            StaleRunError: another run took the job over.
            StorageError: results cannot be recorded.
        """
        plan = self._shared.plan
        try:
            self._run()
        except (EngineDiedError, EngineStartError) as error:
            if not plan.give_up(self._number):
                plan.fail(error)
                raise
            self._context.progress.note(f"Rank {self._number} is given up and the others go on: {error}")
        except BaseException as error:
            plan.fail(error)
            raise
        finally:
            self._engine.close()

    def _run(self) -> None:
        plan = self._shared.plan
        look_at_leases_s = time.monotonic() + EXPIRY_POLL_S
        while not plan.is_over:
            for seq in self._set_aside():
                self._context.progress.note(
                    f"Request {seq} is set aside: engines died of it while it ran alone."
                )
            part = next_part(self._context, plan, self._number)
            if part is not None:
                self._run_part(EngineRun(self._context, self._shared, self._number, part, self._num_windows))
            elif plan.is_done:
                return
            elif not plan.take_over(self._number):
                self._context.stop.wait(IDLE_POLL_S)
                if time.monotonic() >= look_at_leases_s:
                    plan.release_expired()
                    look_at_leases_s = time.monotonic() + EXPIRY_POLL_S

    def _set_aside(self) -> list[int]:
        shared = self._shared
        return set_culprits_aside(self._context, shared.plan, shared.recorder, self._number, time.time())

    def _run_part(self, engine_run: EngineRun) -> None:
        plan = self._shared.plan
        try:
            engine_run.run(self._engine)
        except EngineDiedError as error:
            self._engine.close()
            if not plan.is_over:
                self._take_death(engine_run, error)
        else:
            if engine_run.num_left and not plan.is_over:
                raise EngineError(
                    f"The engine ended and left {engine_run.num_left} requests of job {self._context.job_id} "
                    "without a result; run the job again, and report this if it stays so.",
                    job_id=self._context.job_id,
                )
        finally:
            self._num_windows = engine_run.num_windows

    def _take_death(self, engine_run: EngineRun, error: EngineDiedError) -> None:
        """Writes a death down and waits before the next start. Raises when there is to be none."""
        context = self._context
        in_flight = list(engine_run.in_flight)
        record_engine_death(context.wiring.database, context.run, str(error), in_flight)
        if engine_run.num_answers:
            self._budget.answered()
        delay_s = self._budget.died()
        if delay_s is None:
            raise EngineDiedError(
                f"The engine died {self._budget.num_deaths} times in a row and gave no answer in between; it "
                f"is given up. The last time: {error}",
                job_id=context.job_id,
            ) from error
        context.progress.note(
            f"{error} Starting it again in {delay_s:.0f} s (death {self._budget.num_deaths} in a row); "
            f"{len(in_flight)} requests were in flight and run apart from the others."
        )
        context.stop.wait(delay_s)
