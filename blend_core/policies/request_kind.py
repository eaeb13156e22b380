"""Requests of one kind as a policy sees them: what waits of it, and how long its answers are."""

from collections.abc import Iterable
from dataclasses import dataclass

from blend_core.length_distribution import LengthDistribution
from blend_core.performance import StepTimeModel
from blend_core.policies.base import LEFT, RIGHT, Side


@dataclass(slots=True)
class Work:
    """Sums over requests; every shared prompt token counts for one of those that share it.

    Attributes:
        num_prefill_tokens: `sum u`, prompt tokens to compute.
        prefill_tokens_sq: `sum p^2 - (p - u)^2`, for prefill attention.
        num_output_tokens: `sum E[d]`.
        decode_kv_tokens: `sum p E[d] + E[d^2] / 2`, KV tokens that decoding reads.
        held_kv_tokens: `sum u E[d] + E[d^2] / 2`, KV tokens held, summed over steps.
    """

    num_prefill_tokens: float = 0.0
    prefill_tokens_sq: float = 0.0
    num_output_tokens: float = 0.0
    decode_kv_tokens: float = 0.0
    held_kv_tokens: float = 0.0

    def add(self, other: "Work") -> None:
        """Adds the sums of others."""
        self.num_prefill_tokens += other.num_prefill_tokens
        self.prefill_tokens_sq += other.prefill_tokens_sq
        self.num_output_tokens += other.num_output_tokens
        self.decode_kv_tokens += other.decode_kv_tokens
        self.held_kv_tokens += other.held_kv_tokens

    def density(self, times: StepTimeModel) -> float:
        """Seconds of compute over seconds of decode attention, by step times; a step's fixed part left
        out."""
        compute_s = (
            times.gemm_s_per_token * (self.num_prefill_tokens + self.num_output_tokens)
            + times.prefill_s_per_token_sq * self.prefill_tokens_sq
        )
        decode_s = times.decode_s_per_kv_token * self.decode_kv_tokens
        return compute_s / decode_s if decode_s > 0 else float("inf")


class RequestKind:
    """Waiting requests of one side whose answers are alike, or whose lengths are known.

    Sums are kept so that a request joins or leaves in constant time, and a new distribution of lengths counts
    for all of them at once.

    Attributes:
        lengths: of the answers; None for requests with lengths of their own.
        side: the side that they are taken from.
        num_waiting: requests that were never admitted.
        in_flight: slots in flight, by the side that they were admitted on.
    """

    __slots__ = (
        "_known_held",
        "_known_output",
        "_known_read",
        "_num_prompt_tokens",
        "_prefill_tokens",
        "_prefill_tokens_sq",
        "in_flight",
        "lengths",
        "num_waiting",
        "side",
    )

    def __init__(self, lengths: LengthDistribution | None, side: Side) -> None:
        self.lengths = lengths
        self.side = side
        self.in_flight: dict[Side, set[int]] = {LEFT: set(), RIGHT: set()}
        self.clear()

    def clear(self) -> None:
        """None waits."""
        self.num_waiting = 0
        self._num_prompt_tokens = self._prefill_tokens = self._prefill_tokens_sq = 0.0
        self._known_output = self._known_read = self._known_held = 0.0

    def count(self, sign: int, num_prompt_tokens: int, num_shared_tokens: int, output_tokens: float) -> None:
        """Adds (`sign` 1) or takes away (-1) a request; `output_tokens` matters where lengths are known."""
        num_unshared = num_prompt_tokens - num_shared_tokens
        self.num_waiting += sign
        self._num_prompt_tokens += sign * num_prompt_tokens
        self._prefill_tokens += sign * num_unshared
        self._prefill_tokens_sq += sign * num_unshared * (num_prompt_tokens + num_shared_tokens)
        if self.lengths is None:
            growth = output_tokens * output_tokens / 2.0
            self._known_output += sign * output_tokens
            self._known_read += sign * (num_prompt_tokens * output_tokens + growth)
            self._known_held += sign * (num_unshared * output_tokens + growth)

    def work(self) -> Work:
        """Returns what waits of the kind."""
        lengths = self.lengths
        if lengths is None:
            return Work(
                self._prefill_tokens,
                self._prefill_tokens_sq,
                self._known_output,
                self._known_read,
                self._known_held,
            )
        growth = self.num_waiting * lengths.second_moment / 2.0
        return Work(
            self._prefill_tokens,
            self._prefill_tokens_sq,
            self.num_waiting * lengths.mean,
            self._num_prompt_tokens * lengths.mean + growth,
            self._prefill_tokens * lengths.mean + growth,
        )


class SplitKind:
    """Requests whose answers are alike, and which of them are on which side.

    Attributes:
        parts: the kind's requests by the side that they are on; both learn the same lengths.
        side: the side that the kind's requests are on, but for those that belong to a bundle.
    """

    __slots__ = ("parts", "side")

    def __init__(self, lengths: LengthDistribution | None) -> None:
        """`lengths` is None for requests with lengths of their own."""
        self.parts = {side: RequestKind(lengths, side) for side in Side}
        self.side = LEFT


def total_work(kinds: Iterable[RequestKind]) -> Work:
    """Returns the sums over kinds."""
    total = Work()
    for kind in kinds:
        total.add(kind.work())
    return total


def request_work(
    num_prompt_tokens: int, num_shared_tokens: int, output_tokens: float, output_tokens_sq: float
) -> Work:
    """Returns the work of one request by the mean and the second moment of its answer's length."""
    # Not by way of a kind: this is asked of every request when sides are sorted.
    num_unshared = num_prompt_tokens - num_shared_tokens
    growth = output_tokens_sq / 2.0
    return Work(
        num_prefill_tokens=num_unshared,
        prefill_tokens_sq=num_prompt_tokens**2 - num_shared_tokens**2,
        num_output_tokens=output_tokens,
        decode_kv_tokens=num_prompt_tokens * output_tokens + growth,
        held_kv_tokens=num_unshared * output_tokens + growth,
    )
