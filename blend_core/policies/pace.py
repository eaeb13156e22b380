"""How much of what is left a step should do, so that compute and KV reading keep the proportion of the
whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from blend_core.length_distribution import LENGTH_GRID, LENGTH_GRID_ENDS, LengthDistribution
from blend_core.performance import StepTimeModel
from blend_core.policies.base import EngineLimits
from blend_core.policies.kv_projection import contribution
from blend_core.policies.request_kind import Work

Floats = npt.NDArray[np.float64]

FREE_KV_SHARE: Final = 0.01
"""KV that the right side leaves free: blocks that are part full, and prompts on their way in."""

_MAX_EXACT: Final = 256
"""Requests of one kind in flight that are projected one by one; of more, so many stand for all."""


def _no_kv() -> Floats:
    return np.zeros(len(LENGTH_GRID))


@dataclass(frozen=True, slots=True)
class RunningWork:
    """What the right side's requests in flight, and those that wait after a preemption, have still to do.

    Attributes:
        num_output_tokens: output tokens to come.
        held_kv_tokens: KV tokens that will be held, summed over steps to come.
        longest_tokens: steps that the longest has to go, as expected.
        kv_mean: `(num_bins,)` expected KV tokens of those in flight on the grid of steps ahead.
        kv_variance: `(num_bins,)` of them.
    """

    num_output_tokens: float = 0.0
    held_kv_tokens: float = 0.0
    longest_tokens: float = 0.0
    kv_mean: Floats = field(default_factory=_no_kv)
    kv_variance: Floats = field(default_factory=_no_kv)


@dataclass(frozen=True, slots=True)
class RunningRequests:
    """Requests of the right side that share a distribution of lengths, those that were preempted included.

    Attributes:
        lengths: of their answers; None where each is known.
        num_output_tokens: `(num_requests,)` so far.
        num_kv_tokens: `(num_requests,)` that each holds by itself, or will once it is back.
        left: `(num_requests,)` tokens still to come, looked at where they are known.
        is_in_flight: `(num_requests,)`.
    """

    lengths: LengthDistribution | None
    num_output_tokens: Floats
    num_kv_tokens: Floats
    left: Floats
    is_in_flight: npt.NDArray[np.bool_]


def running_work(kinds: Sequence[RunningRequests]) -> RunningWork:
    """Sums up what runs, kind by kind."""
    num_output_tokens = held = longest = 0.0
    mean, variance = _no_kv(), _no_kv()
    for kind in kinds:
        kv = kind.num_kv_tokens
        if kind.lengths is None:
            left = np.maximum(kind.left, 1.0)
            left_sq = left * left
        else:
            left, left_sq = kind.lengths.remaining(kind.num_output_tokens)
        num_output_tokens += float(left.sum())
        held += float((kv * left + left_sq / 2.0).sum())
        longest = max(longest, float(left.max(initial=0.0)))
        if kind.lengths is None:
            mean += _known_kv(kv[kind.is_in_flight], left[kind.is_in_flight])
            continue
        places = np.flatnonzero(kind.is_in_flight)
        weight = max(1.0, len(places) / _MAX_EXACT)
        if weight > 1.0:
            # Ordered by what is left, every so-manyth stands for its neighbours.
            ordered = places[np.argsort(left[places], kind="stable")]
            places = ordered[(np.arange(_MAX_EXACT) * weight + weight / 2.0).astype(np.int64)]
        alive = kind.lengths.alive_ahead(kind.num_output_tokens[places])
        bins = slice(alive.shape[1])
        means, variances = contribution(kv[places, None], alive, LENGTH_GRID_ENDS[bins])
        mean[bins] += weight * means.sum(axis=0)
        variance[bins] += weight * variances.sum(axis=0)
    return RunningWork(num_output_tokens, held, longest, mean, variance)


def _known_kv(num_kv_tokens: Floats, left: Floats) -> Floats:
    """Returns the KV ahead, `(num_bins,)`, of requests that hold so much and surely run so many steps."""
    num_bins = np.searchsorted(LENGTH_GRID, left)  # of each the bins in which it is alive
    alive = np.bincount(num_bins, minlength=len(LENGTH_GRID) + 1)[::-1].cumsum()[::-1]
    held = np.bincount(num_bins, num_kv_tokens, minlength=len(LENGTH_GRID) + 1)[::-1].cumsum()[::-1]
    return held[1:] + alive[1:] * LENGTH_GRID_ENDS


@dataclass(frozen=True, slots=True)
class Pace:
    """An even pace over the steps that are left.

    Attributes:
        num_steps: steps that what is left takes at least: as KV holds it, as steps compute it, as so many at
            once decode it, or as the longest answer takes.
        prefill_tokens_per_step: prompt tokens to compute, spread over them.
        decode_kv_tokens_per_step: KV tokens to read, spread over them.
        left_kv_tokens: KV tokens that the left side holds at this pace.
        full_share: share of the steps that it takes if each computes all that it may.
        hidden_share: share of the time, all of it at most, that compute and KV reading hide of one another if
            every step has both in proportion, beyond what each step hides anyway: what balancing can gain.
        is_step_bound: reading the weights takes longer than computing what is left, so that the time taken is
            that of so many steps, and KV that nobody uses makes more of them.
    """

    num_steps: float
    prefill_tokens_per_step: float
    decode_kv_tokens_per_step: float
    left_kv_tokens: float
    full_share: float
    hidden_share: float
    is_step_bound: bool

    @classmethod
    def of(
        cls,
        left: Work,
        right: Work,
        running: RunningWork,
        limits: EngineLimits,
        times: StepTimeModel,
        *,
        longest_waiting: float = 0.0,
        left_head: Work | None = None,
        left_output_tokens: float = 0.0,
    ) -> "Pace":
        """Returns the pace for what is left to do.

        Args:
            left: what waits on the left side.
            right: what waits on the right side.
            running: what runs of the right side.
            limits: of the engine.
            times: of the device.
            longest_waiting: expected length of the longest answer that waits.
            left_head: what waits of the kind that the left side takes from next.
            left_output_tokens: expected length of its answers.
        """
        capacity = float(limits.num_blocks * limits.block_size)
        num_prefill_tokens = left.num_prefill_tokens + right.num_prefill_tokens
        num_output_tokens = left.num_output_tokens + right.num_output_tokens + running.num_output_tokens
        held = left.held_kv_tokens + right.held_kv_tokens + running.held_kv_tokens
        num_full_steps = (num_prefill_tokens + num_output_tokens) / limits.max_num_batched_tokens
        num_steps = max(
            held / capacity,
            num_full_steps,
            num_output_tokens / limits.max_num_seqs,
            running.longest_tokens,
            longest_waiting,
            1.0,
        )
        # What the left side will hold: it computes so many tokens a step, each of which holds KV for so long.
        left_kv_tokens = 0.0
        if left_head is not None and left_head.num_prefill_tokens > 0:
            held_per_token = left_head.held_kv_tokens / left_head.num_prefill_tokens
            left_kv_tokens = left.num_prefill_tokens / num_steps * held_per_token
        decode_kv_tokens = left.decode_kv_tokens + right.decode_kv_tokens + running.held_kv_tokens
        token_s = times.gemm_s_per_token * (num_prefill_tokens + num_output_tokens)
        weight_read_s = times.weight_read_s * num_steps
        fixed_s = times.gemm_fixed_s * num_steps
        compute_s = max(fixed_s + token_s, weight_read_s)
        read_s = times.decode_s_per_kv_token * decode_kv_tokens
        # A step takes so long anyway: it hides as much reading, and tokens while the weights are read.
        least_s = max(fixed_s, weight_read_s)
        hidden_s = max(0.0, min(compute_s, read_s) - least_s) + min(token_s, least_s - fixed_s)
        return cls(
            num_steps=num_steps,
            # The last prompt of the left side has an answer to come, which would run alone.
            prefill_tokens_per_step=num_prefill_tokens
            / max(num_full_steps, num_steps - left_output_tokens, 1.0),
            decode_kv_tokens_per_step=decode_kv_tokens / num_steps,
            left_kv_tokens=left_kv_tokens,
            full_share=num_full_steps / num_steps,
            hidden_share=hidden_s / max(compute_s + read_s, 1e-30),
            is_step_bound=weight_read_s > fixed_s + token_s,
        )

    def prefill_tokens(
        self,
        times: StepTimeModel,
        decode_kv_tokens: float,
        right_kv_tokens: float,
        peak_up_to: Callable[[float], float],
        num_decoding: int,
    ) -> tuple[float, float]:
        """Returns the prompt tokens of a step, and the share of its KV reading that is reached, 1 at most.

        In proportion to the KV that the step reads, where an even step reads `decode_kv_tokens_per_step`, or
        the most that the right side will come to if that is less: KV that only the left side would fill is
        not waited for. A step whose weights have to be read anyway computes the tokens that cost nothing
        more. Where steps have to be full most of the time, what one leaves out cannot be made up later: from
        half of them on, a step is held back the less, and not at all where every one has to be full.

        Args:
            times: of the device.
            decode_kv_tokens: KV tokens that decoding reads now.
            right_kv_tokens: KV tokens that the right side holds now.
            peak_up_to: tells the most that the right side's requests in flight are expected to hold, or what
                it is given where they come to more. Asked only where it decides.
            num_decoding: requests that decode.
        """
        even = self.decode_kv_tokens_per_step
        if decode_kv_tokens < even:
            peak_tokens = peak_up_to(even - decode_kv_tokens + right_kv_tokens)
            even = min(even, decode_kv_tokens + max(0.0, peak_tokens - right_kv_tokens))
        share = decode_kv_tokens / max(1.0, even)
        fixed_tokens = times.gemm_fixed_s / times.gemm_s_per_token
        free_tokens = times.weight_read_s / times.gemm_s_per_token - fixed_tokens - num_decoding
        even_tokens = self.prefill_tokens_per_step * share - fixed_tokens * (1.0 - share)
        if share < 1.0:
            urgency = max(0.0, 2.0 * self.full_share - 1.0)
            even_tokens += urgency * (self.prefill_tokens_per_step - even_tokens)
        # Never below nothing: a step that computes less than its share is no debt of those after it.
        return max(even_tokens, free_tokens, 0.0), min(1.0, share)
