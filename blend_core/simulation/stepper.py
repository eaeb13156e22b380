"""The loop over steps: a policy, requests in flight and a step-time model, driven until nothing is left."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from blend_core.engines.base import StepWindow
from blend_core.engines.windows import MAX_WINDOW_S, MAX_WINDOW_STEPS, WindowAccumulator
from blend_core.errors import EngineError
from blend_core.performance import StepTimeModel
from blend_core.plan import Plan
from blend_core.policies.base import AdmissionPolicy, EngineLimits, Side
from blend_core.simulation.flight import FOR_EVER, Flight, StepPrefill
from blend_core.simulation.kv_cache import KvCache
from blend_core.simulation.prompts import PromptBlocks
from blend_core.specs import DeviceProfile, ModelSpec


class SimulatedEnd(NamedTuple):
    """One request that ended.

    Attributes:
        row: its row in the `RequestArrays`.
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

    Attributes:
        now: simulated time in seconds.
        compute_time_s: seconds of GEMM and prefill attention of all steps so far.
        decode_time_s: seconds of decode attention; the sum of both is what a sequential engine would take for
            the same steps.
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
        self._times = StepTimeModel.of(model, device)
        self._windows = WindowAccumulator(model, device, revision, overlap=overlap)
        self._revision = revision
        self._overlap = overlap
        self._first_admission: dict[int, tuple[float, int, int]] = {}
        self._num_cached_tokens = 0
        self._num_preempted = 0
        self.now = started_at
        self.compute_time_s = 0.0
        self.decode_time_s = 0.0

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

    def cached_tokens(self, seq: int) -> int:
        """Leading tokens of a waiting request in the cache."""
        row = self._row_of[seq]
        return self._cache.num_cached_tokens(row, self._flight.num_prefill_tokens(row))

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

    def revise(self, plan: Plan) -> StepWindow | None:
        """Puts a later plan in force; returns the window before it, if any."""
        self._policy.revise(plan)
        self._revision = plan.revision
        return self._windows.revise(plan.revision)

    def withdraw(self, seqs: Iterable[int]) -> None:
        """Drops requests, waiting or in flight, without an event."""
        for seq in seqs:
            row = self._row_of[seq]
            num_output_tokens = self._flight.num_output_tokens(row)
            if self._flight.is_running(row):
                self._flight.leave(row)
            self._policy.finished(seq, num_output_tokens)

    def flush(self) -> StepWindow | None:
        """Closes and returns the last window, if a step was executed since the one before."""
        return self._windows.flush()

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
            self._num_preempted += 1
        cache.take(flight.num_growing_blocks)
        return may_admit

    def _fill(self, step: StepPrefill, budget: int, may_admit: bool, events: list[SimulationEvent]) -> int:
        """Fills the step with prompt tokens; returns for how many steps nothing more can be admitted."""
        flight = self._flight
        while budget > 0:
            if flight.prefilling is None:
                if not may_admit:
                    return 1
                if flight.num_running >= self._limits.max_num_seqs:
                    return FOR_EVER
                admission = self._policy.next_request(self)
                if admission is None:
                    return self._policy.quiet_steps(self)
                if not self._admit(admission.seq, admission.side, events):
                    return 1
                continue
            budget -= step.add_chunk(flight, budget)
        return FOR_EVER

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
            self._num_cached_tokens += num_cached_tokens
        return True

    def _execute(self, prefill: StepPrefill, events: list[SimulationEvent]) -> None:
        """One step with prompt tokens in it."""
        flight, times = self._flight, self._times
        num_decode_tokens = flight.num_decoding
        decode_kv_tokens = flight.decode_kv_tokens + num_decode_tokens
        for row in prefill.completed:
            self._policy.decoding(self._seq[row])
        self._policy.advanced(1)
        ended = flight.step(prefill.completed)
        compute_s = (
            times.gemm_s(prefill.num_tokens + num_decode_tokens)
            + times.prefill_s_per_token_sq * prefill.num_tokens_sq
        )
        decode_s = times.decode_s_per_kv_token * decode_kv_tokens
        started_at = self.now
        self.now += times.combined_s(compute_s, decode_s, overlap=self._overlap)
        self.compute_time_s += compute_s
        self.decode_time_s += decode_s
        sums = self._windows.sums
        sums.num_prefill_tokens += prefill.num_tokens
        sums.num_recomputed_tokens += prefill.num_recomputed_tokens
        sums.prefill_tokens_sq += prefill.num_tokens_sq
        num_used = self._limits.num_blocks - self._cache.num_free
        self._record(1, started_at, num_decode_tokens, decode_kv_tokens, num_used, len(ended), events)
        for row in ended:
            self._end(row, events, fits=True)

    def _decode(self, quiet_steps: int, events: list[SimulationEvent]) -> None:
        """Steps that only decode: to the first end or lack of blocks, or as long as the policy is quiet.

        Plain numbers in a loop: a simulated run has a hundred thousand of these steps and more.
        """
        flight, cache, times = self._flight, self._cache, self._times
        first = clock = flight.clock
        last = first + min(quiet_steps, flight.next_end - first)
        num_decoding = flight.num_decoding
        compute_s = times.gemm_s(num_decoding)
        decode_s_per_kv_token, interference = times.decode_s_per_kv_token, times.overlap_interference
        overlap, growth, block_size = self._overlap, flight.growth, cache.block_size
        kv_tokens, num_free, now = flight.decode_kv_tokens, cache.num_free, self.now
        num_used = self._limits.num_blocks - num_free
        has_room = True
        ended: list[int] = []
        while has_room and clock < last:
            started_at, chunk_start = now, clock
            num_steps = self._windows.sums.num_steps
            closes_at = (self._windows.started_at if num_steps else now) + MAX_WINDOW_S
            chunk_end = min(last, clock + MAX_WINDOW_STEPS - num_steps)
            sum_kv_tokens = sum_used = 0
            while True:
                kv_tokens += num_decoding
                decode_s = decode_s_per_kv_token * kv_tokens
                if not overlap:
                    now += compute_s + decode_s
                elif compute_s > decode_s:
                    now += compute_s + interference * decode_s
                else:
                    now += decode_s + interference * compute_s
                sum_kv_tokens += kv_tokens
                sum_used += num_used
                clock += 1
                if clock < last:
                    num_growing = growth[clock % block_size]
                    if num_growing > num_free:
                        has_room = False
                        break
                    num_free -= num_growing
                    num_used += num_growing
                if clock == chunk_end or now >= closes_at:
                    break
            if clock == last:
                ended = flight.jump(last - first)
            num_steps = clock - chunk_start
            self.now = now
            self.compute_time_s += compute_s * num_steps
            self.decode_time_s += decode_s_per_kv_token * sum_kv_tokens
            self._record(
                num_steps, started_at, num_decoding * num_steps, sum_kv_tokens, sum_used, len(ended), events
            )
        if clock < last:
            flight.jump(clock - first)
        cache.take(cache.num_free - num_free)
        self._policy.advanced(clock - first)
        for row in ended:
            self._end(row, events, fits=True)

    def _record(
        self,
        num_steps: int,
        started_at: float,
        num_decode_tokens: int,
        decode_kv_tokens: int,
        num_used_blocks: int,
        num_finished: int,
        events: list[SimulationEvent],
    ) -> None:
        """Adds steps up to now to the window; arguments are sums over them."""
        windows, flight = self._windows, self._flight
        sums = windows.sums
        if sums.num_steps == 0:
            windows.started_at = started_at
        sums.num_steps += num_steps
        sums.duration_s += self.now - started_at
        sums.predicted_s += self.now - started_at
        sums.num_decode_tokens += num_decode_tokens
        sums.num_cached_tokens += self._num_cached_tokens
        sums.decode_kv_tokens += decode_kv_tokens
        sums.kv_usage += num_used_blocks / self._limits.num_blocks
        sums.num_running_left += flight.num_running_by_side[Side.LEFT] * num_steps
        sums.num_running_right += flight.num_running_by_side[Side.RIGHT] * num_steps
        sums.num_preempted += self._num_preempted
        sums.num_finished += num_finished
        self._num_cached_tokens = self._num_preempted = 0
        window = windows.close_if_full(self.now)
        if window is not None:
            events.append(window)

    def _end(self, row: int, events: list[SimulationEvent], *, fits: bool) -> None:
        num_output_tokens = self._flight.num_output_tokens(row)
        if self._flight.is_running(row):
            self._flight.leave(row)
        seq = self._seq[row]
        self._policy.finished(seq, num_output_tokens)
        started_at, num_cached_tokens, revision = self._first_admission.pop(
            row, (self.now, 0, self._revision)
        )
        events.append(
            SimulatedEnd(row, revision, num_output_tokens, num_cached_tokens, started_at, self.now, fits)
        )
