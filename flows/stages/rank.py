"""A rank: one engine after another on a device, until what it holds of the plan has ended."""

import time
from collections.abc import Callable, Sequence

from blend_core.engines.process import EngineProcess
from blend_core.errors import EngineDiedError, EngineError, EngineStartError
from blend_core.wording import count_text
from flows.outage import Value, through_outages
from flows.stages.context import JobContext
from flows.stages.engine_run import EngineRun, SharedParts
from flows.stages.parts import Part, next_part, set_culprits_aside
from flows.stages.restarts import RestartBudget, RestartRules
from storage.suspects import record_engine_death

IDLE_POLL_S = 0.1
EXPIRY_POLL_S = 15.0


class Rank:
    """One model replica of a run.

    An engine that dies, hangs, fails or runs out of memory is started again after a pause. What was in flight
    runs apart from all others, in groups that are halved at every death. After too many deaths without an
    answer between them the rank is given up and the others take what it held; the last one ends the run.
    """

    __slots__ = (
        "_budget",
        "_context",
        "_engine",
        "_num_answers",
        "_num_answers_at_death",
        "_num_windows",
        "_number",
        "_shared",
    )

    def __init__(
        self,
        context: JobContext,
        number: int,
        engine: EngineProcess,
        shared: SharedParts,
        first_batch_index: int,
    ) -> None:
        """Takes the rank's number, from 0, its engine, which is not started yet, and the number of its next
        window."""
        settings = context.wiring.settings.engine
        self._context = context
        self._number = number
        self._engine = engine
        self._shared = shared
        self._budget = RestartBudget(RestartRules(settings.max_restarts, settings.restart_delay_s))
        self._num_windows = first_batch_index
        self._num_answers = 0
        # What the rank's engines had answered in all when one died of a request alone.
        self._num_answers_at_death: dict[int, int] = {}

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
            self._run_or_give_up()
        except BaseException as error:
            plan.fail(error)
            raise
        finally:
            self._engine.close()

    def _run_or_give_up(self) -> None:
        try:
            self._run()
        except (EngineDiedError, EngineStartError) as error:
            # The others may have what the rank holds, if there are any.
            if not self._through_outages(lambda: self._shared.plan.give_up(self._number)):
                raise
            self._context.progress.note(f"Rank {self._number} is given up and the others go on: {error}")

    def _run(self) -> None:
        plan = self._shared.plan
        look_at_leases_s = time.monotonic() + EXPIRY_POLL_S
        while not plan.is_over:
            part = self._through_outages(self._next_part)
            if part is not None:
                self._run_part(EngineRun(self._context, self._shared, self._number, part, self._num_windows))
            elif plan.is_done:
                return
            elif not plan.take_over(self._number):
                self._context.stop.wait(IDLE_POLL_S)
                if time.monotonic() >= look_at_leases_s:
                    plan.release_expired()
                    look_at_leases_s = time.monotonic() + EXPIRY_POLL_S

    def _next_part(self) -> Part | None:
        context, shared = self._context, self._shared
        if shared.plan.is_over:
            return None
        for seq in set_culprits_aside(context, shared.plan, shared.recorder, self._number, time.time()):
            context.progress.note(f"Request {seq} is set aside: engines died of it while it ran alone.")
        return next_part(context, shared.plan, self._number)

    def _through_outages(self, work: Callable[[], Value]) -> Value:
        return through_outages(work, self._context.stop, self._context.progress.note)

    def _run_part(self, engine_run: EngineRun) -> None:
        plan = self._shared.plan
        try:
            engine_run.run(self._engine)
        except EngineDiedError as error:
            self._engine.close()
            if not plan.is_over:
                self._take_death(engine_run, error)
        else:
            if engine_run.num_answers:
                self._budget.answered()
            if engine_run.num_left and not plan.is_over:
                raise EngineError(
                    f"The engine ended and left {engine_run.num_left} requests of job {self._context.job_id} "
                    "without a result; run the job again, and report this if it stays so.",
                    job_id=self._context.job_id,
                )
        finally:
            self._num_windows = engine_run.num_windows
            self._num_answers += engine_run.num_answers

    def _others_answered(self, in_flight: Sequence[int], num_answers: int) -> bool:
        """Whether the rank's engines have answered since one died of the same request alone.

        Where that was in an earlier process, since this one began. No clock is asked, and no other rank: its
        answers say nothing of the engines here.
        """
        if len(in_flight) != 1:
            return False
        (alone,) = in_flight
        before = self._num_answers_at_death.get(alone, 0)
        self._num_answers_at_death[alone] = num_answers
        return num_answers > before

    def _take_death(self, engine_run: EngineRun, error: EngineDiedError) -> None:
        """Writes a death down and waits before the next start. Raises when there is to be none."""
        context = self._context
        in_flight = list(engine_run.in_flight)
        others_answered = self._others_answered(in_flight, self._num_answers + engine_run.num_answers)
        # Of one rank among several, a reader wants to know which device it was.
        is_one_of_several = self._shared.plan.num_ranks > 1
        reason = f"Rank {self._number}: {error}" if is_one_of_several else str(error)
        record_engine_death(
            context.wiring.database, context.run, reason, in_flight, others_answered=others_answered
        )
        if engine_run.num_answers:
            self._budget.answered()
        delay_s = self._budget.died()
        if delay_s is None:
            raise EngineDiedError(
                f"The engine died {self._budget.num_deaths} times in a row and gave no answer in between; it "
                f"is given up. The last time: {reason}",
                job_id=context.job_id,
            ) from error
        context.progress.note(
            f"{reason} Starting it again in {delay_s:.0f} s (death {self._budget.num_deaths} in a row); "
            f"{count_text(len(in_flight), 'request')} in flight will run apart from the others."
        )
        context.stop.wait(delay_s)
