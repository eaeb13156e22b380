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

    __slots__ = ("_asked", "_num_awaited")

    def __init__(self) -> None:
        """Nothing is asked back."""
        # By owner and request: who is to have it, and since when that is asked.
        self._asked: dict[int, dict[int, tuple[int, float]]] = {}
        self._num_awaited: Counter[int] = Counter()

    def ask(self, owner: int, takers: Mapping[int, int], now_s: float) -> None:
        """Requests, each for its taker, are asked back from their owner; the latest taker counts."""
        asked = self._asked.setdefault(owner, {})
        for seq, taker in takers.items():
            earlier, since_s = asked.get(seq, (None, now_s))
            if earlier is not None:
                self._num_awaited[earlier] -= 1
            self._num_awaited[taker] += 1
            asked[seq] = taker, since_s

    def is_asked(self, owner: int, seq: int) -> bool:
        """Whether the owner has yet to say what becomes of a request."""
        return seq in self._asked.get(owner, ())

    def is_awaited(self, taker: int) -> bool:
        """Whether a rank waits for requests."""
        return self._num_awaited[taker] > 0

    def settle(self, owner: int, seqs: Iterable[int] | None = None) -> dict[int, list[int]]:
        """The owner has answered: by taker what it was asked for, in the order asked. None is everything."""
        asked = self._asked.get(owner, {})
        answered = set(asked) if seqs is None else asked.keys() & set(seqs)
        settled: dict[int, list[int]] = {}
        for seq in [seq for seq in asked if seq in answered]:
            taker, _ = asked.pop(seq)
            self._num_awaited[taker] -= 1
            settled.setdefault(taker, []).append(seq)
        return settled

    def overdue(self, asked_before_s: float) -> list[int]:
        """Owners that have not answered what they were asked by then."""
        return [
            owner
            for owner, asked in self._asked.items()
            # The first is the oldest.
            if asked and next(iter(asked.values()))[1] <= asked_before_s
        ]
