"""Kills at random moments of a job, and how long the job took to go on after each."""

import random
import threading
import time
from dataclasses import dataclass, field
from statistics import median

import psycopg
from faults.checks import Snapshot
from faults.jobs import STAGES, Job, Standing, Watch, run_again
from faults.stack import COMPONENTS, Stack

from blend_core.errors import BlendError, StorageUnavailableError

# Of fifty kills; a flow process and a Prefect server take longest to come up again.
SHARES = {"engine": 14, "flow": 7, "prefect": 6, "s3": 12, "postgres": 11}
# Where the services and the flow process are killed; the engine lives in `infer` only.
STAGE_WEIGHTS = {"ingest": 4, "plan": 3, "infer": 6, "export": 4, "report": 3}
# A look is a query: it takes a part of a core that the job needs. The short stages are over in a moment.
POLL_S = 0.05
POLL_OF_SHORT_STAGES_S = 0.01
PROCESS_POLL_S = 0.5
STUCK_AFTER_S = 180.0
RERUN_AFTER_S = 45.0


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """What to kill and when.

    Attributes:
        component: one of `COMPONENTS`.
        stage: in which stage of a job.
        moment: how far into it, 0 to 1.
    """

    component: str
    stage: str
    moment: float


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill that landed while a job was in progress.

    Attributes:
        component: what was killed.
        stage: in which stage.
        num_done: requests that had a result.
        num_total: requests that were known.
        recovery_s: seconds until the job went on; infinite where it did not.
    """

    component: str
    stage: str
    num_done: int
    num_total: int
    recovery_s: float


@dataclass(slots=True)
class StageTimes:
    """How long stages last here, learnt from what was seen; for aiming inside the short ones."""

    seen_s: dict[str, list[float]] = field(
        default_factory=lambda: {"ingest": [1.5], "plan": [0.2], "export": [0.1], "report": [0.03]}
    )

    def typical_s(self, stage: str) -> float:
        return median(self.seen_s[stage])


def plan_kills(num_kills: int, rng: random.Random) -> list[PlannedKill]:
    """Kills of all components in their shares, in random order at random moments."""
    weights = [SHARES[component] / sum(SHARES.values()) for component in COMPONENTS]
    due = [0.0] * len(COMPONENTS)
    components = []
    for _ in range(num_kills):
        due = [each + weight for each, weight in zip(due, weights, strict=True)]
        first = max(range(len(COMPONENTS)), key=due.__getitem__)
        due[first] -= 1.0
        components.append(COMPONENTS[first])
    rng.shuffle(components)
    return [plan_kill(component, rng) for component in components]


def plan_kill(component: str, rng: random.Random) -> PlannedKill:
    """A kill of a component at a random moment of a random stage."""
    stages, weights = list(STAGE_WEIGHTS), list(STAGE_WEIGHTS.values())
    stage = "infer" if component == "engine" else rng.choices(stages, weights)[0]
    return PlannedKill(component, stage, rng.random())


def in_order_of_time(kills: list[PlannedKill]) -> list[PlannedKill]:
    """The kills of one job, the earliest first; in each stage Prefect's last.

    The job goes on while Prefect comes up, which takes longest, and would pass by the moments of the others.
    """
    return sorted(
        kills,
        key=lambda kill: (
            STAGES.index(kill.stage),
            kill.component == "prefect",
            kill.moment,
            kill.component,
        ),
    )


class Executioner:
    """Kills what it is told to while a just submitted job runs, heals, and sees that the job goes on."""

    def __init__(self, stack: Stack, watch: Watch, job: Job, times: StageTimes) -> None:
        self.snapshots: list[Snapshot] = []
        self._stack = stack
        self._watch = watch
        self._job = job
        self._times = times
        self._look_for_processes_at_s = 0.0
        # When the job was handed to the deployment, until a flow run is seen.
        self._submitted_at_s: float | None = time.monotonic()

    def carry_out(self, planned: PlannedKill) -> Kill | None:
        """Waits for the moment, kills, heals and waits until the job goes on; None where it came too late."""
        before = self._wait_for(planned)
        if before is None or before.run_id is None or before.stage is None:
            return None
        results = self._watch.results(self._job)
        snapshot = Snapshot(time.time(), results)
        if not self._stack.kill(planned.component):
            return None
        killed_at_s = time.time()
        self.snapshots.append(snapshot)
        recovery_s = self._until_it_goes_on(before, killed_at_s)
        if self._watch.run_ended_before(self._job, before.run_id, killed_at_s):
            return None
        return Kill(planned.component, before.stage, before.num_done, before.num_total, recovery_s)

    def finish(self) -> bool:
        """Waits for the job's end; False where it is stuck."""
        deadline_s = time.monotonic() + STUCK_AFTER_S
        last = (-1, -1)
        while time.monotonic() < deadline_s:
            standing = self._look()
            if standing is not None:
                if standing.is_over:
                    return True
                if (standing.rank, standing.num_done) > last:
                    last = (standing.rank, standing.num_done)
                    deadline_s = time.monotonic() + STUCK_AFTER_S
                self._run_again_if_needed(standing)
            time.sleep(0.1)
        return False

    def _wait_for(self, planned: PlannedKill) -> Standing | None:
        """The job's standing at the planned moment, read just now; None once it is past the stage."""
        entered_s: float | None = None
        wanted = STAGES.index(planned.stage)
        deadline_s = time.monotonic() + STUCK_AFTER_S
        while time.monotonic() < deadline_s:
            standing = self._look()
            if standing is None:
                time.sleep(POLL_S)
                continue
            if standing.rank > wanted:
                if entered_s is not None and planned.stage != "infer":
                    self._times.seen_s[planned.stage].append(time.monotonic() - entered_s)
                return None
            self._run_again_if_needed(standing)
            if standing.stage == planned.stage:
                entered_s = time.monotonic() if entered_s is None else entered_s
                is_moment = self._is_moment(planned, standing, time.monotonic() - entered_s)
                if is_moment and self._runs(planned.component):
                    return standing
            time.sleep(_poll_s(planned, standing))
        return None

    def _runs(self, component: str) -> bool:
        return component != "engine" or bool(self._stack.engine_processes())

    def _is_moment(self, planned: PlannedKill, standing: Standing, in_stage_s: float) -> bool:
        if planned.stage == "infer":
            return standing.num_done >= planned.moment * 0.95 * standing.num_total
        return in_stage_s >= planned.moment * self._times.typical_s(planned.stage)

    def _until_it_goes_on(self, before: Standing, killed_at_s: float) -> float:
        healing = threading.Thread(target=self._heal, name="heal")
        healing.start()
        recovered_s = float("inf")
        while time.time() - killed_at_s < STUCK_AFTER_S:
            standing = self._look()
            if standing is not None:
                if recovered_s == float("inf") and self._goes_on(before, standing, killed_at_s):
                    recovered_s = time.time() - killed_at_s
                if recovered_s < float("inf") and not healing.is_alive():
                    break
                if not healing.is_alive():
                    self._run_again_if_needed(standing)
            time.sleep(POLL_S)
        healing.join()
        return recovered_s

    def _goes_on(self, before: Standing, now: Standing, killed_at_s: float) -> bool:
        """Whether the job reached a later stage, or finished a request, since the kill."""
        if now.rank > before.rank:
            return True
        if before.stage != "infer":
            return False
        try:
            return self._watch.has_answer_after(self._job, killed_at_s)
        except (psycopg.Error, StorageUnavailableError):
            return False

    def _heal(self) -> None:
        self._stack.heal(lambda line: None)

    def _run_again_if_needed(self, standing: Standing) -> None:
        """What an operator does who sees a job that nothing runs; once, unless nothing comes of it."""
        now_s = time.monotonic()
        if standing.is_over or now_s < self._look_for_processes_at_s:
            return
        self._look_for_processes_at_s = now_s + PROCESS_POLL_S
        if self._stack.flow_processes():
            self._submitted_at_s = None
            return
        if self._submitted_at_s is not None and now_s - self._submitted_at_s < RERUN_AFTER_S:
            return
        # Looked at once more: the flow run may just have ended, and the job with it.
        latest = self._look()
        if latest is None or latest.is_over:
            return
        try:
            run_again(self._stack.wiring, self._job)
            self._submitted_at_s = now_s
        except BlendError:
            return  # Prefect is on its way up; the next look tries again

    def _look(self) -> Standing | None:
        try:
            return self._watch.standing(self._job)
        except (psycopg.Error, StorageUnavailableError):
            return None


def _poll_s(planned: PlannedKill, standing: Standing) -> float:
    """How long until the next look: not long where a short stage is waited for and may begin now."""
    is_far = standing.stage == "infer" and standing.num_done < 0.9 * standing.num_total
    return POLL_S if is_far or planned.stage == "infer" else POLL_OF_SHORT_STAGES_S
