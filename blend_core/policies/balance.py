"""Whether two sides run side by side in proportion: what that gains, what it takes, and what it rests on."""

from blend_core.policies.base import LEFT, RIGHT, EngineLimits
from blend_core.policies.ledger import Ledger
from blend_core.policies.pace import Pace, RunningWork
from blend_core.policies.waiting_sides import WaitingSides


def balance_pays(
    pace: Pace, sides: WaitingSides, ledger: Ledger, running: RunningWork, limits: EngineLimits
) -> bool:
    """Whether compute and KV reading are to be kept in proportion while something waits on the left side.

    They must hide more of one another than the room takes that this needs. And where everything that is left
    has room at once, nothing is held back by lengths that are guesses for the most part: an even pace to an
    end that is guessed too late costs more than it can gain in a job so small.

    Args:
        pace: of what is left to do.
        sides: what waits.
        ledger: of the policy.
        running: what runs of the right side.
        limits: of the engine.
    """
    num_kv_tokens = limits.num_blocks * limits.block_size
    if pace.hidden_share <= _room_share(sides, num_kv_tokens, limits.max_num_seqs):
        return False
    return _tokens_left(sides, ledger, running) > num_kv_tokens or not sides.are_lengths_guessed


def _room_share(sides: WaitingSides, num_kv_tokens: int, max_num_seqs: int) -> float:
    """Share of KV, or of requests in flight, that balancing takes: of the left side one prompt is on its way
    in, chunk by chunk, and room is kept for another."""
    return max(2.0 * sides.mean_unshared_tokens(LEFT) / num_kv_tokens, 1.0 / max_num_seqs)


def _tokens_left(sides: WaitingSides, ledger: Ledger, running: RunningWork) -> float:
    """KV tokens of all that is left to do, if it were all there at its full length; what answers in flight on
    the left side, short ones, have still to grow is left out."""
    left, right = sides.work(LEFT), sides.work(RIGHT)
    waiting = sum(work.num_prefill_tokens + work.num_output_tokens for work in (left, right))
    return waiting + running.num_output_tokens + sum(ledger.num_tokens.values())
