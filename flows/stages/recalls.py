"""Requests that engines were asked to give back, and the ranks that they are for."""

from collections import Counter
from collections.abc import Iterable, Mapping


class Recalls:
    """What was asked back and is not answered yet; for one thread at a time.

    An engine starts requests by itself, so another rank gets what has not started there only when the engine
    has let go of it.

    Invariants:
        - a request is asked back from one rank, for one rank.
    """

    __slots__ = ("_asked_at_s", "_num_awaited", "_takers")

    def __init__(self) -> None:
        """Nothing is asked back."""
        self._takers: dict[int, dict[int, int]] = {}
        self._asked_at_s: dict[int, float] = {}
        self._num_awaited: Counter[int] = Counter()

    def ask(self, owner: int, takers: Mapping[int, int], now_s: float) -> None:
        """Requests, each for its taker, are asked back from their owner; a later taker counts."""
        waiting = self._takers.setdefault(owner, {})
        if not waiting:
            self._asked_at_s[owner] = now_s
        for seq, taker in takers.items():
            self._num_awaited[waiting.get(seq, taker)] -= seq in waiting
            self._num_awaited[taker] += 1
            waiting[seq] = taker

    def is_asked(self, owner: int, seq: int) -> bool:
        """Whether the owner has yet to say what becomes of a request."""
        return seq in self._takers.get(owner, ())

    def is_awaited(self, taker: int) -> bool:
        """Whether a rank waits for requests."""
        return self._num_awaited[taker] > 0

    def settle(self, owner: int, seqs: Iterable[int] | None = None) -> dict[int, list[int]]:
        """The owner has answered: by taker what it was asked for, in the order asked. None is everything."""
        waiting = self._takers.get(owner, {})
        answered = set(waiting) if seqs is None else waiting.keys() & set(seqs)
        settled: dict[int, list[int]] = {}
        for seq in [seq for seq in waiting if seq in answered]:
            taker = waiting.pop(seq)
            self._num_awaited[taker] -= 1
            settled.setdefault(taker, []).append(seq)
        return settled

    def overdue(self, asked_before_s: float) -> list[int]:
        """Owners that have not answered for long."""
        return [
            owner
            for owner, waiting in self._takers.items()
            if waiting and self._asked_at_s[owner] <= asked_before_s
        ]
