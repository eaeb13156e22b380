"""Simulated time: how long steps take, and the windows over them."""

from blend_core.engines.base import StepWindow
from blend_core.engines.windows import MAX_WINDOW_S, MAX_WINDOW_STEPS, WindowAccumulator
from blend_core.performance import StepTimeModel
from blend_core.policies.base import EngineLimits, Side
from blend_core.simulation.flight import Flight, StepPrefill
from blend_core.simulation.kv_cache import KvCache
from blend_core.specs import DeviceProfile, ModelSpec


class RunClock:
    """Adds up steps: their time, and what goes into their window.

    Attributes:
        now: simulated time in seconds.
        compute_time_s: seconds of GEMM and prefill attention of all steps so far.
        decode_time_s: seconds of decode attention of all steps so far.
        num_cached_tokens: prompt tokens served from the cache since the last step.
        num_preempted: preemptions since the last step.
        windows: the windows of the run.
    """

    __slots__ = (
        "_num_blocks",
        "_overlap",
        "_times",
        "compute_time_s",
        "decode_time_s",
        "now",
        "num_cached_tokens",
        "num_preempted",
        "windows",
    )

    def __init__(
        self,
        model: ModelSpec,
        device: DeviceProfile,
        limits: EngineLimits,
        revision: int,
        *,
        overlap: bool,
        started_at: float,
    ) -> None:
        """Begins at `started_at`; arguments as of `Stepper`."""
        self._times = StepTimeModel.of(model, device)
        self._num_blocks = limits.num_blocks
        self._overlap = overlap
        self.windows = WindowAccumulator(model, device, revision, overlap=overlap)
        self.now = started_at
        self.compute_time_s = 0.0
        self.decode_time_s = 0.0
        self.num_cached_tokens = 0
        self.num_preempted = 0

    def prefill_step(
        self,
        prefill: StepPrefill,
        num_decode_tokens: int,
        decode_kv_tokens: int,
        num_used_blocks: int,
        flight: Flight,
        num_finished: int,
    ) -> StepWindow | None:
        """Adds a step that computed prompt tokens; returns the window that it closes.

        Args:
            prefill: its prompt tokens.
            num_decode_tokens: its other tokens.
            decode_kv_tokens: KV tokens that they read.
            num_used_blocks: blocks that requests in flight refer to.
            flight: what was in flight.
            num_finished: requests that the step ends.
        """
        times = self._times
        compute_s = (
            times.gemm_s(prefill.num_tokens + num_decode_tokens)
            + times.prefill_s_per_token_sq * prefill.num_tokens_sq
        )
        decode_s = times.decode_s_per_kv_token * decode_kv_tokens
        started_at = self.now
        self.now += times.combined_s(compute_s, decode_s, overlap=self._overlap)
        self.compute_time_s += compute_s
        self.decode_time_s += decode_s
        sums = self.windows.sums
        sums.num_prefill_tokens += prefill.num_tokens
        sums.num_recomputed_tokens += prefill.num_recomputed_tokens
        sums.prefill_tokens_sq += prefill.num_tokens_sq
        return self._add(
            1, started_at, num_decode_tokens, decode_kv_tokens, num_used_blocks, flight, num_finished
        )

    def decode_steps(
        self, quiet_steps: int, flight: Flight, cache: KvCache
    ) -> tuple[list[StepWindow], list[int]]:
        """Lets decoding requests grow, and nothing else, until one ends or blocks run out, or so many steps.

        Blocks for the first step are taken already; those for the others are taken here. Plain numbers in a
        loop: a simulated run has hundreds of thousands of these steps.

        Returns:
            The windows that were closed, and the rows that the last step ends.
        """
        times = self._times
        first = clock = flight.clock
        last = first + min(quiet_steps, flight.next_end - first)
        num_decoding = flight.num_decoding
        compute_s = times.gemm_s(num_decoding)
        decode_s_per_kv_token, interference = times.decode_s_per_kv_token, times.overlap_interference
        overlap, growth, block_size = self._overlap, flight.growth, cache.block_size
        kv_tokens, num_free, now = flight.decode_kv_tokens, cache.num_free, self.now
        num_used = self._num_blocks - num_free
        has_room = True
        windows: list[StepWindow] = []
        ended: list[int] = []
        while has_room and clock < last:
            started_at, chunk_start = now, clock
            num_steps = self.windows.sums.num_steps
            closes_at = (self.windows.started_at if num_steps else now) + MAX_WINDOW_S
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
            window = self._add(
                num_steps, started_at, num_decoding * num_steps, sum_kv_tokens, sum_used, flight, len(ended)
            )
            if window is not None:
                windows.append(window)
        if clock < last:
            flight.jump(clock - first)
        cache.take(cache.num_free - num_free)
        return windows, ended

    def _add(
        self,
        num_steps: int,
        started_at: float,
        num_decode_tokens: int,
        decode_kv_tokens: int,
        num_used_blocks: int,
        flight: Flight,
        num_finished: int,
    ) -> StepWindow | None:
        """Adds steps up to now to the window; arguments are sums over them."""
        windows = self.windows
        sums = windows.sums
        if sums.num_steps == 0:
            windows.started_at = started_at
        sums.num_steps += num_steps
        sums.duration_s += self.now - started_at
        sums.predicted_s += self.now - started_at
        sums.num_decode_tokens += num_decode_tokens
        sums.num_cached_tokens += self.num_cached_tokens
        sums.decode_kv_tokens += decode_kv_tokens
        sums.kv_usage += num_used_blocks / self._num_blocks
        sums.num_running_left += flight.num_running_by_side[Side.LEFT] * num_steps
        sums.num_running_right += flight.num_running_by_side[Side.RIGHT] * num_steps
        sums.num_preempted += self.num_preempted
        sums.num_finished += num_finished
        self.num_cached_tokens = self.num_preempted = 0
        return windows.close_if_full(self.now)
