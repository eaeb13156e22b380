"""The loop over steps: a policy, requests in flight and a step-time model, driven until nothing is left."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from blend_core.engines.base import StepWindow
from blend_core.errors import EngineError
from blend_core.plan import Plan
from blend_core.policies.base import FOR_EVER, AdmissionPolicy, EngineLimits, Side
from blend_core.simulation.flight import Flight, StepPrefill
from blend_core.simulation.kv_cache import KvCache
from blend_core.simulation.prompts import PromptBlocks
from blend_core.simulation.run_clock import RunClock
from blend_core.specs import DeviceProfile, ModelSpec


class SimulatedEnd(NamedTuple):
    """One request that ended.

    Attributes:
        row: its row in the requests that are simulated.
        revision: plan revision in force at its first admission.
        num_output_tokens: tokens of its answer.
        num_cached_tokens: prompt tokens served from the cache at first admission.
        started_at: first admission.
        finished_at: its end.
        fits: False where prompt and answer need more KV than there is; then there is no answer.
    """

    row: int
    revision: int
    num_output_tokens: int
    num_cached_tokens: int
    started_at: float
    finished_at: float
    fits: bool


SimulationEvent = SimulatedEnd | StepWindow


class Stepper:
    """Simulates an engine step by step, and in one go those steps in which nothing but decoding happens.

    Prompts are prefilled in order of admission, in chunks of what a step's budget leaves. Where blocks run
    out the request admitted last is preempted, and nothing is admitted in that step. The object is the
    `EngineView` that the policy sees.
    """

    def __init__(
        self,
        seqs: Iterable[int],
        prompts: PromptBlocks,
        output_tokens: Iterable[int],
        policy: AdmissionPolicy,
        model: ModelSpec,
        device: DeviceProfile,
        limits: EngineLimits,
        *,
        revision: int,
        overlap: bool,
        started_at: float,
    ) -> None:
        """Prepares a run.

        Args:
            seqs: request of each row.
            prompts: prompt of each row.
            output_tokens: true length of each row's answer; the policy never sees it.
            policy: decides on admissions; made over the plan in force.
            model: what runs.
            device: on what.
            limits: KV blocks and batch bounds.
            revision: revision of the plan in force.
            overlap: whether decode attention runs beside compute.
            started_at: simulated time to begin at.
        """
        self._seq = list(seqs)
        self._row_of = {seq: row for row, seq in enumerate(self._seq)}
        self._policy = policy
        self._limits = limits
        self._cache = KvCache(prompts, limits.num_blocks, limits.block_size)
        self._flight = Flight(prompts, output_tokens, self._cache)
        self._clock = RunClock(model, device, limits, revision, overlap=overlap, started_at=started_at)
        self._revision = revision
        self._first_admission: dict[int, tuple[float, int, int]] = {}
        self._admitted: list[int] = []

    @property
    def now(self) -> float:
        """Simulated time in seconds."""
        return self._clock.now

    @property
    def sequential_s(self) -> float:
        """Seconds of all steps so far where decode attention runs after compute."""
        return self._clock.compute_time_s + self._clock.decode_time_s

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request in flight refers to."""
        return self._cache.num_free

    @property
    def num_running(self) -> int:
        """Requests in flight."""
        return self._flight.num_running

    @property
    def num_decoding(self) -> int:
        """Requests in flight whose prompt is complete."""
        return self._flight.num_decoding

    def num_held_blocks(self, seq: int) -> int:
        """Cached leading blocks of a waiting request that requests in flight refer to."""
        row = self._row_of[seq]
        return self._cache.num_held_blocks(row, self._flight.num_prefill_tokens(row))

    def is_ready(self, seq: int) -> bool:
        """Always: every prompt is here."""
        return True

    @property
    def is_done(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return self._flight.num_running == 0 and self._policy.num_waiting == 0

    def advance(self) -> Sequence[SimulationEvent]:
        """Executes the next step, and those after it in which nothing changes; returns what happened.

        Raises:
            EngineError: the policy starts nothing though nothing runs.
        """
        events: list[SimulationEvent] = []
        may_admit = self._make_room(events)
        step = StepPrefill()
        quiet_steps = self._fill(step, self._policy.begin_step(self), may_admit, events)
        if step.num_tokens > 0:
            self._execute(step, events)
        elif self._flight.num_running > 0:
            self._decode(quiet_steps, events)
        elif not events:
            raise EngineError("The admission policy starts nothing though nothing runs; report its plan.")
        return events

    def take_admitted(self) -> tuple[int, ...]:
        """Seqs admitted for the first time since the last call, in order."""
        admitted, self._admitted = tuple(self._admitted), []
        return admitted

    def revise(self, plan: Plan) -> StepWindow | None:
        """Puts a later plan in force; returns the window before it, if any."""
        self._policy.revise(plan)
        self._revision = plan.revision
        return self._clock.windows.revise(plan.revision)

    def withdraw(self, seqs: Iterable[int]) -> None:
        """Drops requests, waiting or in flight, without an event."""
        for seq in seqs:
            row = self._row_of[seq]
            if self._flight.is_running(row):
                self._flight.leave(row)
            self._policy.finished(seq, 0)

    def flush(self) -> StepWindow | None:
        """Closes and returns the last window, if a step was executed since the one before."""
        return self._clock.windows.flush()

    def _make_room(self, events: list[SimulationEvent]) -> bool:
        """Takes the blocks that decoding needs; returns whether that went without a preemption."""
        flight, cache = self._flight, self._cache
        may_admit = True
        while flight.num_growing_blocks > cache.num_free:
            may_admit = False
            row = flight.preempt_last()
            if flight.num_running == 0:
                # Alone and out of blocks: no order can ever give it more.
                self._end(row, events, fits=False)
                break
            self._policy.preempted(self._seq[row])
            self._clock.num_preempted += 1
        cache.take(flight.num_growing_blocks)
        return may_admit

    def _fill(self, step: StepPrefill, budget: int, may_admit: bool, events: list[SimulationEvent]) -> int:
        """Fills the step with prompt tokens; returns for how many steps nothing more can be admitted."""
        flight = self._flight
        while budget > 0:
            if flight.prefilling is None:
                if not may_admit:
                    return 1
                is_full = flight.num_running >= self._limits.max_num_seqs
                admission = None if is_full else self._policy.next_request(self)
                if admission is None:
                    return self._policy.quiet_steps(self)
                if not self._admit(admission.seq, admission.side, events):
                    return 1
                continue
            budget -= step.add_chunk(flight, budget)
        return self._policy.quiet_steps(self) if step.num_tokens == 0 else FOR_EVER

    def _admit(self, seq: int, side: Side, events: list[SimulationEvent]) -> bool:
        row = self._row_of[seq]
        num_cached_tokens = self._flight.admit(row, side)
        if num_cached_tokens is None:
            if self._flight.num_running > 0:
                return False
            self._end(row, events, fits=False)
            return True
        self._policy.admitted(seq, side, num_cached_tokens)
        if row not in self._first_admission:
            self._first_admission[row] = (self.now, num_cached_tokens, self._revision)
            self._admitted.append(seq)
            self._clock.num_cached_tokens += num_cached_tokens
        return True

    def _execute(self, prefill: StepPrefill, events: list[SimulationEvent]) -> None:
        """One step with prompt tokens in it."""
        flight = self._flight
        num_decode_tokens = flight.num_decoding
        decode_kv_tokens = flight.decode_kv_tokens + num_decode_tokens
        for row in prefill.completed:
            self._policy.decoding(self._seq[row])
        self._policy.advanced(1)
        ended = flight.step(prefill.completed)
        num_used = self._limits.num_blocks - self._cache.num_free
        window = self._clock.prefill_step(
            prefill, num_decode_tokens, decode_kv_tokens, num_used, flight, len(ended)
        )
        if window is not None:
            events.append(window)
        for row in ended:
            self._end(row, events, fits=True)

    def _decode(self, quiet_steps: int, events: list[SimulationEvent]) -> None:
        """Steps that only decode: to the first end or lack of blocks, or as long as the policy is quiet."""
        first = self._flight.clock
        windows, ended = self._clock.decode_steps(quiet_steps, self._flight, self._cache)
        self._policy.advanced(self._flight.clock - first)
        events.extend(windows)
        for row in ended:
            self._end(row, events, fits=True)

    def _end(self, row: int, events: list[SimulationEvent], *, fits: bool) -> None:
        num_output_tokens = self._flight.num_output_tokens(row)
        if self._flight.is_running(row):
            self._flight.leave(row)
        seq = self._seq[row]
        self._policy.finished(seq, num_output_tokens if fits else 0)
        started_at, num_cached_tokens, revision = self._first_admission.pop(
            row, (self.now, 0, self._revision)
        )
        events.append(
            SimulatedEnd(row, revision, num_output_tokens, num_cached_tokens, started_at, self.now, fits)
        )
