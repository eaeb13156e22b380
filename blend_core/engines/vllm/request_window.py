"""The bounded window of a job that vLLM holds, and when it is asked what comes next. No vLLM here."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from blend_core.engines.vllm.control import SchedulerControl
from blend_core.request import Request

LOOK_EVERY_STEPS: Final = 32
"""What comes next changes with admissions, and now and then by itself. A look costs as much as a step of
policy, and scheduling waits for it."""


class StartedRequest(NamedTuple):
    """A request that was in flight.

    Attributes:
        request: it.
        started_at: its first admission, seconds since the epoch.
        revision: plan revision then in force.
    """

    request: Request
    started_at: float
    revision: int


class RequestWindow:
    """Requests that vLLM has, from both ends of the plan.

    The policy is asked which come next, which is a look, after `LOOK_EVERY_STEPS` steps, after as many starts
    as may be in flight, when something says so (`look_again`), and as long as nothing runs or nothing waits.
    After a look so many are at hand that a step which starts all it can leaves as many for the next.

    Attributes:
        queued: those that were never in flight, by `seq`.
        started: those that were, by `seq`.
    """

    def __init__(
        self, control: SchedulerControl, abort: Callable[[Sequence[str]], None], max_num_seqs: int
    ) -> None:
        """Begins empty.

        Args:
            control: the scheduler.
            abort: ends requests in vLLM, by its ids.
            max_num_seqs: requests in flight at most.
        """
        self._control = control
        self._abort = abort
        self._look_ahead = 2 * max_num_seqs
        self._fetch_size = 2 * self._look_ahead
        self._look_in_steps = self._look_in_starts = 0
        self.queued: dict[int, Request] = {}
        self.started: dict[int, StartedRequest] = {}

    def __contains__(self, seq: int) -> bool:
        return seq in self.queued or seq in self.started

    def __len__(self) -> int:
        return len(self.queued) + len(self.started)

    def __iter__(self) -> Iterator[int]:
        return chain(self.queued, self.started)

    def missing(self, num_open: int) -> Iterator[list[int]]:
        """Yields seqs that are due soon and not here, if it is time to look; the caller queues them.

        Again and again as long as all of them fail, since the next ones may be missing, too. `num_open`
        requests of the job have not ended.
        """
        if len(self) >= num_open:
            # All that is left is here.
            return
        if self._look_in_steps > 0 and self._look_in_starts > 0 and self.queued and self.started:
            return
        self._look_in_steps, self._look_in_starts = LOOK_EVERY_STEPS, self._look_ahead // 2
        has_queued = False
        while not all(seq in self for seq in self._control.upcoming(self._look_ahead)):
            if has_queued:
                # Some have started meanwhile. They are heard of first, so that the window stays bounded.
                self.look_again()
                return
            upcoming = self._control.upcoming(self._fetch_size)
            self._let_go(set(upcoming))
            missing = [seq for seq in upcoming if seq not in self]
            yield missing
            has_queued = any(seq in self for seq in missing)

    def look_again(self) -> None:
        """Something else comes next: a plan was revised, or the policy asked for what is not here."""
        self._look_in_steps = 0

    def step(self) -> None:
        """A step goes by."""
        self._look_in_steps -= 1

    def start(self, seqs: Sequence[int], started_at: float, revision: int) -> tuple[int, ...]:
        """vLLM started requests; returns those that are here, as one may just have been forgotten."""
        self._look_in_starts -= len(seqs)
        for seq in seqs:
            request = self.queued.pop(seq, None)
            if request is not None:
                self.started[seq] = StartedRequest(request, started_at, revision)
        return tuple(seq for seq in seqs if seq in self.started)

    def forget(self, seq: int) -> None:
        """A request ended, if it is here."""
        self.queued.pop(seq, None)
        self.started.pop(seq, None)

    def _let_go(self, upcoming: set[int]) -> None:
        """Takes back what was queued and is not due soon any more, so that the window stays bounded."""
        if len(self.queued) > 2 * self._fetch_size:
            released = self._control.release([seq for seq in self.queued if seq not in upcoming])
            self._abort([str(seq) for seq in released])
            for seq in released:
                del self.queued[seq]
