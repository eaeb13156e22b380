"""Requests that wait in vLLM: which are there, which could start, what of them is cached. No vLLM here."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from blend_core.engines.vllm.scheduler_view import Readiness, SchedulerView, seq_of


class WaitingRequests:
    """vLLM's waiting requests by `seq`: those that may start, and those that were let go of.

    Attributes:
        by_seq: those that may start, now or later; only looked at from outside.
        refused: those that vLLM refuses and that were not offered yet.
        asked_in_vain: `is_ready` was asked for a request that vLLM has not got.

    Invariants:
        - a request that is let go of may not start, and is vLLM's until vLLM removes it;
        - what is passed over in this step is not in `by_seq` until it is put back.
    """

    __slots__ = (
        "_blocked",
        "_held",
        "_passed_over",
        "_released",
        "_view",
        "asked_in_vain",
        "by_seq",
        "refused",
    )

    def __init__(self, view: SchedulerView) -> None:
        """Begins empty; `view` is the scheduler that they wait for."""
        self._view = view
        self.by_seq: dict[int, Any] = {}
        self.refused: list[Any] = []
        self.asked_in_vain = False
        # New ones that could not start when they came: their answer format is being compiled, or refused.
        self._blocked: dict[int, Any] = {}
        self._passed_over: set[int] = set()
        self._released: dict[str, Any] = {}
        # What `num_held_blocks` found, as long as no block has changed hands.
        self._held: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.by_seq) + len(self._released)

    def __iter__(self) -> Iterator[Any]:
        return chain(self.by_seq.values(), self._released.values())

    def add(self, request: Any) -> None:
        """A new request waits."""
        seq = seq_of(request)
        self.by_seq[seq] = request
        if self._view.readiness(request) is not Readiness.READY:
            self._blocked[seq] = request

    def add_released(self, request: Any) -> None:
        """A new request is vLLM's until vLLM removes it, and may not start."""
        self._released[request.request_id] = request

    def pass_over(self, seq: int) -> None:
        """vLLM took a request and skips it in this step."""
        self._passed_over.add(seq)

    def put_back(self, requests: Iterable[Any]) -> None:
        """Requests that were passed over wait again."""
        self._passed_over.clear()
        for request in requests:
            self.by_seq[seq_of(request)] = request

    def remove(self, request: Any) -> bool:
        """A request ended; whether it was one that might have started, as far as it is known here at all."""
        if self._released.pop(request.request_id, None) is not None:
            return False
        seq = seq_of(request)
        waiting = self.by_seq.get(seq)
        if waiting is None or waiting.request_id != request.request_id:
            return False
        del self.by_seq[seq]
        self._blocked.pop(seq, None)
        return True

    def release(self, seq: int) -> bool:
        """Lets go of a request; False where none of this `seq` waits."""
        request = self.by_seq.pop(seq, None)
        if request is None:
            return False
        self._blocked.pop(seq, None)
        self._released[request.request_id] = request
        return True

    def look_at_blocked(self) -> None:
        """A step begins: finds out which of the blocked are so no more, and which are refused."""
        if not self._blocked:
            return
        for seq, request in list(self._blocked.items()):
            readiness = self._view.readiness(request)
            if readiness is not Readiness.BLOCKED:
                del self._blocked[seq]
            if readiness is Readiness.REFUSED:
                self.refused.append(request)

    def next_refused(self) -> Any | None:
        """Takes one of `refused` that still waits."""
        while self.refused:
            request = self.refused.pop()
            if self.by_seq.get(seq_of(request)) is request:
                return request
        return None

    def is_ready(self, seq: int) -> bool:
        """See `EngineView`."""
        request = self.by_seq.get(seq)
        if request is None:
            # What vLLM passes over is there, and nobody need fetch it.
            self.asked_in_vain = self.asked_in_vain or seq not in self._passed_over
            return False
        return self._view.readiness(request) is Readiness.READY

    def num_held_blocks(self, seq: int) -> int:
        """See `EngineView`."""
        held = self._held.get(seq)
        if held is None:
            request = self.by_seq.get(seq)
            held = self._held[seq] = 0 if request is None else self._view.num_held_blocks(request)
        return held

    def blocks_changed(self) -> None:
        """Blocks changed hands, or new ones are cached."""
        if self._held:
            self._held = {}
