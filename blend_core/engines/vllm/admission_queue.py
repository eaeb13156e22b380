"""vLLM's queue of waiting requests in the policy's order, with the policy's gate. No vLLM here."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain
from threading import RLock
from typing import Any, Final, Protocol

from blend_core.engines.vllm.flight import Flight, StepCounts
from blend_core.policies.base import AdmissionPolicy, EngineLimits, Side

SEQ_ARGUMENT: Final = "blend_seq"
"""Where a request says its `seq`: in vLLM's `SamplingParams.extra_args`, which reach the scheduler."""


class Readiness(Enum):
    """Whether vLLM can start a waiting request now."""

    READY = "ready"
    BLOCKED = "blocked"
    REFUSED = "refused"


class SchedulerView(Protocol):
    """What the queue asks the scheduler whose queue it is."""

    def num_free_blocks(self) -> int:
        """Blocks that no request refers to, in the unit that a policy counts in."""

    def num_held_blocks(self, request: Any) -> int:
        """Cached leading blocks of a waiting request that requests in flight refer to."""

    def readiness(self, request: Any) -> Readiness:
        """Whether a waiting request could start, blocks and budget aside; `REFUSED`: it never will."""

    def is_running(self, request: Any) -> bool:
        """Whether the scheduler runs the request."""

    def num_answer_tokens(self, request: Any) -> int:
        """Tokens of the answer of a request that ended; 0 where it has none, as one that was aborted."""


class AdmissionQueue:
    """In vLLM's eyes a `RequestQueue`; in the policy's eyes an `EngineView`.

    vLLM asks `bool(queue)`, looks at `peek_request()`, tries to allocate, and takes it by `pop_request()`.
    `bool` asks the policy: it is true when a request may start now, whatever waits, and `peek_request` gives
    that request until it is taken. What vLLM takes and then puts back was not started. That a request runs is
    told to the policy at the next question, when vLLM has set how many of its tokens the cache had.

    When nothing runs and something is ready, a request is offered even if the policy names none: a gate that
    waits for what is not there would never open.

    Every method may be called from any thread.

    Invariants:
        - a request that vLLM has queued is in `waiting`, skipped for this step, or released;
        - the policy knows as in flight what `flight` holds, and nothing else.
    """

    def __init__(
        self,
        view: SchedulerView,
        limits: EngineLimits,
        elapsed: Callable[[], float],
        num_stages: int = 1,
    ) -> None:
        """Starts without a policy, which `start` brings.

        Args:
            view: the scheduler.
            limits: of the engine, blocks in the policy's unit.
            elapsed: seconds of a clock that never jumps.
            num_stages: of the pipeline: with several, requests decode in turns.
        """
        self.lock = RLock()
        self.flight = Flight(limits.block_size)
        self.added_s = 0.0
        self._limits = limits
        self._view = view
        self._elapsed = elapsed
        self._num_stages = num_stages
        self._num_unheard_tokens = 0
        self._policy: AdmissionPolicy | None = None
        self._revision = 0
        self._waiting: dict[int, Any] = {}
        self._compiling: dict[int, Any] = {}
        self._refused: list[Any] = []
        self._preempted: dict[int, Side] = {}
        self._released: dict[str, Any] = {}
        # What `num_held_blocks` found, as long as no block has changed hands.
        self._held: dict[int, int] = {}
        self._next: tuple[Any, Side] | None = None
        self._taken: tuple[Any, Side] | None = None
        self._admitted: list[int] = []
        self._num_cached_tokens = 0
        self._num_preempted = 0
        self._num_finished = 0
        self._asked_in_vain = False

    # What a run asks.

    def start(self, policy: AdmissionPolicy, revision: int) -> None:
        """Begins a run: nothing waits and nothing is in flight."""
        with self.lock:
            self.flight = Flight(self._limits.block_size)
            self._policy, self._revision = policy, revision
            self._preempted.clear()
            self._admitted, self._num_cached_tokens = [], 0
            self._num_preempted = self._num_finished = self._num_unheard_tokens = 0

    @property
    def policy(self) -> AdmissionPolicy:
        """The policy of the run."""
        assert self._policy is not None, "no run was started"
        return self._policy

    @property
    def revision(self) -> int:
        """Plan revision in force."""
        return self._revision

    @revision.setter
    def revision(self, revision: int) -> None:
        self._revision = revision

    def release(self, seqs: Iterable[int]) -> tuple[int, ...]:
        """Lets go of requests that were never in flight, so that they can be queued again later.

        Returns those that it let go of. vLLM still has them: abort them.
        """
        released = []
        for seq in seqs:
            request = self._waiting.get(seq)
            if request is not None and not self.flight.was_admitted(seq):
                del self._waiting[seq]
                self._compiling.pop(seq, None)
                self._released[request.request_id] = request
                released.append(seq)
        return tuple(released)

    # What vLLM's scheduler asks: `RequestQueue`.

    def add_request(self, request: Any) -> None:
        """A new request waits."""
        with self.lock:
            seq = seq_of(request)
            self._waiting[seq] = request
            if self._view.readiness(request) is not Readiness.READY:
                self._compiling[seq] = request

    def __bool__(self) -> bool:
        """Whether a request may start now. Asks the policy; the answer is what `peek_request` gives."""
        begin = self._elapsed()
        self._settle(None)
        self._next = self._choose()
        self.added_s += self._elapsed() - begin
        return self._next is not None

    def peek_request(self) -> Any:
        """The request that may start now."""
        if self._next is None:
            raise IndexError("no request may start now")
        return self._next[0]

    def pop_request(self) -> Any:
        """Takes the request that may start now, to run it or to skip it."""
        if self._next is None:
            raise IndexError("no request may start now")
        self._taken, self._next = self._next, None
        request = self._taken[0]
        del self._waiting[seq_of(request)]
        return request

    def prepend_request(self, request: Any) -> None:
        """A request in flight was preempted."""
        seq = seq_of(request)
        if seq in self.flight:
            self._preempted[seq] = self.flight.preempt(seq)
            self._held.clear()
            self._num_preempted += 1
            self.policy.preempted(seq)
        self._waiting[seq] = request

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Requests that were skipped wait again."""
        self._settle(None)
        for request in requests:
            self._waiting[seq_of(request)] = request

    def remove_request(self, request: Any) -> None:
        """A waiting request ended."""
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Waiting requests ended; those that do not wait here are left alone."""
        with self.lock:
            for request in requests:
                seq = seq_of(request)
                if self._released.pop(request.request_id, None) is not None:
                    continue
                waiting = self._waiting.get(seq)
                if waiting is None or waiting.request_id != request.request_id:
                    continue
                del self._waiting[seq]
                self._compiling.pop(seq, None)
                self._preempted.pop(seq, None)
                self.flight.forget(seq)
                self._num_finished += 1
                self.policy.finished(seq, self._view.num_answer_tokens(request))

    def __len__(self) -> int:
        """Requests that wait, whether they may start or not."""
        return len(self._waiting) + len(self._released)

    def __iter__(self) -> Iterator[Any]:
        """Requests that wait, in no promised order."""
        return chain(self._waiting.values(), self._released.values())

    # What the policy asks: `EngineView`.

    @property
    def num_free_blocks(self) -> int:
        """See `EngineView`."""
        return max(0, self._view.num_free_blocks() - self.flight.num_promised_blocks)

    @property
    def num_running(self) -> int:
        """See `EngineView`."""
        return len(self.flight)

    @property
    def num_decoding(self) -> int:
        """See `EngineView`."""
        return self.flight.num_decoding

    def num_held_blocks(self, seq: int) -> int:
        """See `EngineView`."""
        held = self._held.get(seq)
        if held is None:
            request = self._waiting.get(seq)
            held = self._held[seq] = 0 if request is None else self._view.num_held_blocks(request)
        return held

    def is_ready(self, seq: int) -> bool:
        """See `EngineView`."""
        request = self._waiting.get(seq)
        if request is None:
            self._asked_in_vain = True
            return False
        return self._view.readiness(request) is Readiness.READY

    # A step, as the scheduler class goes through it.

    def begin_step(self) -> int:
        """Starts a step; returns the prompt tokens that it may compute, at least 1 where nothing decodes."""
        for seq, request in list(self._compiling.items()):
            readiness = self._view.readiness(request)
            if readiness is not Readiness.BLOCKED:
                del self._compiling[seq]
            if readiness is Readiness.REFUSED:
                self._refused.append(request)
        budget = self.policy.begin_step(self)
        return budget if self.flight.num_decoding else max(budget, 1)

    def end_step(self, num_scheduled_tokens: Mapping[str, int], total: int) -> StepCounts | None:
        """Tells the policy what vLLM has scheduled, `total` tokens; None where it is nothing."""
        self._settle(num_scheduled_tokens)
        if total == 0:
            return None
        num_decoding = self.flight.num_decoding
        counts = self.flight.advance(num_scheduled_tokens, total)
        if counts.num_prefill_tokens:
            self._held.clear()
        for seq in counts.completed:
            self.policy.decoding(seq)
        if self._num_stages == 1:
            # What is left out then ends with the token that is on its way.
            self.policy.advanced(1)
        else:
            # A policy hears of all decoding requests at once: when they have had a token each, on average.
            self._num_unheard_tokens += num_decoding - counts.num_left_out
            if self._num_unheard_tokens >= num_decoding:
                self._num_unheard_tokens -= num_decoding
                self.policy.advanced(1)
        return counts

    def reconcile(self, finished_ids: Collection[str]) -> None:
        """Tells the policy of requests in flight that have ended, by vLLM's ids; others are left alone."""
        for seq in self.flight.seqs_of(finished_ids):
            request = self.flight.leave(seq)
            self._held.clear()
            self._num_finished += 1
            self.policy.finished(seq, self._view.num_answer_tokens(request))

    def take_admitted(self) -> tuple[tuple[int, ...], int]:
        """Seqs in flight for the first time since the last call, and how many of their tokens were cached."""
        taken = tuple(self._admitted), self._num_cached_tokens
        self._admitted, self._num_cached_tokens = [], 0
        return taken

    def take_num_preempted(self) -> int:
        """Preemptions since the last call."""
        taken, self._num_preempted = self._num_preempted, 0
        return taken

    def take_num_finished(self) -> int:
        """Requests that ended since the last call."""
        taken, self._num_finished = self._num_finished, 0
        return taken

    def take_asked_in_vain(self) -> bool:
        """Whether the policy asked, since the last call, for a request that is not here."""
        taken, self._asked_in_vain = self._asked_in_vain, False
        return taken

    def _settle(self, num_scheduled_tokens: Mapping[str, int] | None) -> None:
        """Tells the policy of the request that vLLM took last, if it runs.

        Args:
            num_scheduled_tokens: of the step, once vLLM has added them to what is computed.
        """
        if self._taken is None:
            return
        (request, side), self._taken = self._taken, None
        if not self._view.is_running(request):
            return
        seq = seq_of(request)
        num_cached_tokens = request.num_computed_tokens
        if num_scheduled_tokens is not None:
            num_cached_tokens -= num_scheduled_tokens[request.request_id]
        if not self.flight.was_admitted(seq):
            self._admitted.append(seq)
            self._num_cached_tokens += num_cached_tokens
        self._preempted.pop(seq, None)
        self.flight.admit(seq, request, side, num_cached_tokens)
        self._held.clear()
        self.policy.admitted(seq, side, num_cached_tokens)

    def _choose(self) -> tuple[Any, Side] | None:
        while self._refused:
            request = self._refused.pop()
            if self._waiting.get(seq_of(request)) is request:
                # vLLM skips it, and ends it with the step.
                return request, Side.LEFT
        if not self._waiting or len(self.flight) >= self._limits.max_num_seqs:
            return None
        admission = self.policy.next_request(self)
        if admission is not None and admission.seq in self._waiting:
            return self._waiting[admission.seq], admission.side
        return None if len(self.flight) else self._any_ready()

    def _any_ready(self) -> tuple[Any, Side] | None:
        """What waits and can start, soonest first."""
        for seq in chain(self.policy.upcoming(len(self._waiting)), self._waiting):
            if self.is_ready(seq):
                return self._waiting[seq], self._preempted.get(seq, Side.LEFT)
        return None


def seq_of(request: Any) -> int:
    """The `seq` that a request was queued with."""
    seq: int = request.sampling_params.extra_args[SEQ_ARGUMENT]
    return seq
