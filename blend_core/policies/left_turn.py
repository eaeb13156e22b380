"""When the compute-intensive side's next request is due: what steps allow it, and the room that it takes."""

from blend_core.policies.base import EngineView
from blend_core.policies.ledger import PREEMPTED, Ledger


class LeftTurn:
    """Prompt tokens that the left side may start, and KV that its next prompt takes.

    A side that has started more than it was allowed pays that back, and nothing is allowed ahead: what a step
    leaves over is lost to the next one, but for tokens that are too few for a chunk. The ledger is the
    policy's, only looked at.
    """

    __slots__ = ("_allowance_tokens", "_ledger", "_place", "_saved_tokens")

    def __init__(self, ledger: Ledger) -> None:
        """Begins with nothing allowed."""
        self._ledger = ledger
        self._allowance_tokens = 0.0
        self._saved_tokens = 0.0
        self._place: tuple[int, int] | None = None

    def start_over(self) -> None:
        """Another order is in force: nothing is saved, and another request is next."""
        self._saved_tokens, self._place = 0.0, None

    def in_chunks(self, num_tokens: float, chunk_tokens: int) -> float:
        """Returns a step's tokens with those saved up; 0, and saves them all, where they make no chunk."""
        num_tokens += self._saved_tokens
        self._saved_tokens = 0.0
        if num_tokens < chunk_tokens:
            num_tokens, self._saved_tokens = 0.0, num_tokens
        return num_tokens

    def allow(self, num_tokens: float) -> None:
        """A step begins that may compute so many tokens."""
        self._allowance_tokens = min(self._allowance_tokens, 0.0) + num_tokens

    def start(self, num_tokens: int) -> None:
        """A left request was admitted and computes so many tokens."""
        self._allowance_tokens -= num_tokens
        self._place = None

    def leave(self) -> None:
        """A left request in flight left: the next one may find less of its prompt held."""
        self._place = None

    def is_due(self, slot: int) -> bool:
        """Whether a request may start now: within the allowance, or since it was preempted and has paid."""
        return self._allowance_tokens > 0 or self._ledger.phase[slot] is PREEMPTED

    def is_due_soon(self, slot: int) -> bool:
        """Whether a request may start now, or once enough tokens are saved up."""
        return self._saved_tokens > 0 or self.is_due(slot)

    def tokens_to_place(self, view: EngineView, slot: int, block_size: int) -> int:
        """Returns KV tokens that a request's prompt takes, beside what those in flight hold of it."""
        # Looking a prompt up in the cache is dear: once for each that comes or goes on the left side.
        if self._place is None or self._place[0] != slot:
            ledger = self._ledger
            num_tokens = ledger.num_prefill_tokens(slot)
            if ledger.num_shared_tokens[slot] > 0 and view.is_ready(ledger.seq[slot]):
                num_tokens -= view.num_held_blocks(ledger.seq[slot]) * block_size
            self._place = slot, num_tokens
        return self._place[1]
