"""vLLM's queue of waiting requests in the policy's order, with the policy's gate. No vLLM here."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from threading import RLock
from typing import Any

from blend_core.engines.vllm.flight import Flight, StepCounts
from blend_core.engines.vllm.scheduler_view import SchedulerView, run_of, seq_of
from blend_core.engines.vllm.waiting_requests import WaitingRequests
from blend_core.policies.base import LEFT, AdmissionPolicy, EngineLimits, Side

_Offer = tuple[Any, int, Side]
"""A request that may start, its `seq`, and the side whose account it goes on: a plain tuple, made at each
question."""


class AdmissionQueue:
    """In vLLM's eyes a `RequestQueue`; in the policy's eyes an `EngineView`.

    vLLM asks `bool(queue)`, looks at `peek_request()`, tries to allocate, and takes it by `pop_request()`.
    `bool` asks the policy: it is true when a request may start now, whatever waits, and `peek_request` gives
    that request until it is taken. What vLLM takes and then puts back was not started. That a request runs is
    told to the policy at the next question, when vLLM has set how many of its tokens the cache had.

    When nothing runs and something is ready, a request is offered even if the policy names none: a gate that
    waits for what is not there would never open.

    vLLM's scheduler calls from its own thread, within a step with `lock` held; a run from any other, by
    `LocalControl`.

    Attributes:
        policy: of the run; there is none before `start`.
        revision: plan revision in force.
        num_runs: runs begun so far.
        lock: for calls from another thread than vLLM's.
        flight: requests in flight.

    Invariants:
        - a request that vLLM has queued is in `_waiting`, or vLLM skips it in this step;
        - the policy knows as in flight what `flight` holds, and nothing else.
    """

    policy: AdmissionPolicy

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
        self.revision = self.num_runs = 0
        self._added_s = 0.0
        self._limits = limits
        self._view = view
        self._elapsed = elapsed
        self._num_stages = num_stages
        self._num_unheard_tokens = 0
        self._waiting = WaitingRequests(view)
        # Of `EngineView`, and bound once: a policy asks them many times a step.
        self.is_ready = self._waiting.is_ready
        self.num_held_blocks = self._waiting.num_held_blocks
        self._preempted: dict[int, Side] = {}
        # Requests in flight that are to be aborted; others that have not come yet, or have ended already.
        self._withdrawn: set[int] = set()
        self._on_their_way: set[int] = set()
        self._next: _Offer | None = None
        self._taken: _Offer | None = None
        self._admitted: list[int] = []
        self._num_cached_tokens = 0
        self._num_preempted = 0
        self._num_finished = 0

    # What a run asks.

    def start(self, policy: AdmissionPolicy, revision: int) -> int:
        """Begins a run, when the queue is idle; returns its number."""
        with self.lock:
            self.flight = Flight(self._limits.block_size)
            self.policy, self.revision = policy, revision
            self._on_their_way.clear()
            self.num_runs += 1
            self._admitted, self._num_cached_tokens = [], 0
            self._num_preempted = self._num_finished = self._num_unheard_tokens = 0
            return self.num_runs

    def is_idle(self) -> bool:
        """Whether vLLM has no request, as far as it was told to the queue."""
        with self.lock:
            return not self.flight.by_seq and not len(self._waiting)

    def withdraw(self, seqs: Iterable[int], queued: Collection[int]) -> None:
        """Sees to it that none of these starts any more.

        The policy forgets them now, or, of those in flight, when vLLM has aborted them.

        Args:
            seqs: requests, wherever they are.
            queued: those of them that vLLM was given.
        """
        for seq in seqs:
            if seq in self.flight.by_seq:
                self._withdrawn.add(seq)
                continue
            if not self._waiting.release(seq) and seq in queued:
                self._on_their_way.add(seq)
            # Of those that wait, what had started ends here; others may go to another rank.
            self._num_finished += self._preempted.pop(seq, None) is not None
            self.flight.forget(seq)
            self.policy.finished(seq, 0)

    def release(self, seqs: Iterable[int]) -> tuple[int, ...]:
        """Lets go of requests that were never in flight, so that they can be queued again later.

        Returns those that it let go of. vLLM still has them: abort them.
        """
        return tuple(seq for seq in seqs if not self.flight.was_admitted(seq) and self._waiting.release(seq))

    # What vLLM's scheduler asks: `RequestQueue`.

    def add_request(self, request: Any) -> None:
        """A new request waits, but for one that was withdrawn, or its run given up, on its way here."""
        with self.lock:
            if run_of(request) != self.num_runs or seq_of(request) in self._on_their_way:
                self._waiting.add_released(request)
            else:
                self._waiting.add(request)

    def __bool__(self) -> bool:
        """Whether a request may start now. Asks the policy; the answer is what `peek_request` gives."""
        begin = self._elapsed()
        if self._taken is not None:
            self._settle(None)
        self._next = self._choose()
        self._added_s += self._elapsed() - begin
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
        request, seq, _ = self._taken
        del self._waiting.by_seq[seq]
        return request

    def prepend_request(self, request: Any) -> None:
        """A request in flight was preempted."""
        seq = seq_of(request)
        if seq in self._withdrawn:
            # It does not come back.
            self._waiting.blocks_changed()
            self._num_preempted += 1
            self._waiting.add_released(self._end(seq))
            return
        if seq in self.flight.by_seq:
            self._preempted[seq] = self.flight.preempt(seq)
            self._waiting.blocks_changed()
            self._num_preempted += 1
            self.policy.preempted(seq)
        self._waiting.by_seq[seq] = request

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Requests that were skipped wait again."""
        self._settle(None)
        self._waiting.put_back(requests)

    def remove_request(self, request: Any) -> None:
        """A waiting request ended."""
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Waiting requests ended; those that do not wait here are left alone."""
        with self.lock:
            for request in requests:
                if self._waiting.remove(request):
                    seq = seq_of(request)
                    self._preempted.pop(seq, None)
                    self.flight.forget(seq)
                    self._num_finished += 1
                    self.policy.finished(seq, self._num_answer_tokens(seq, request))

    def __len__(self) -> int:
        """Requests that wait, whether they may start or not."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Any]:
        """Requests that wait, in no promised order."""
        return iter(self._waiting)

    # What the policy asks: `EngineView`.

    @property
    def num_free_blocks(self) -> int:
        """See `EngineView`."""
        return max(0, self._view.num_free_blocks() - self.flight.num_promised_blocks)

    @property
    def num_running(self) -> int:
        """See `EngineView`."""
        return len(self.flight.by_seq)

    @property
    def num_decoding(self) -> int:
        """See `EngineView`."""
        return self.flight.num_decoding

    # A step, as the scheduler class goes through it.

    def begin_step(self) -> int:
        """Starts a step; returns the prompt tokens that it may compute, at least 1 where nothing decodes."""
        self._waiting.look_at_blocked()
        budget = self.policy.begin_step(self)
        return budget if self.flight.num_decoding else max(budget, 1)

    def end_step(self, num_scheduled_tokens: Mapping[str, int], total: int) -> StepCounts | None:
        """Tells the policy what vLLM has scheduled, `total` tokens, and lets it prepare.

        Returns None where it is nothing.

        Call it after `take_admitted`, and before the outcome of this step, or of the one before it, changes a
        request.
        """
        if total == 0:
            return None
        num_decoding = self.flight.num_decoding
        completed, counts = self.flight.advance(num_scheduled_tokens, total)
        if counts.num_prefill_tokens:
            self._waiting.blocks_changed()
        for seq in completed:
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
        self.policy.prepare()
        return counts

    def reconcile(self, finished_ids: Collection[str]) -> list[Any]:
        """Tells the policy of requests in flight that have ended, by vLLM's ids; others are left alone.

        Returns them, so that they are let go of when the caller likes.
        """
        ended = self.flight.seqs_of(finished_ids)
        if not ended:
            return []
        self._waiting.blocks_changed()
        return [self._end(seq) for seq in ended]

    def take_admitted(self, num_scheduled_tokens: Mapping[str, int]) -> tuple[tuple[int, ...], int]:
        """Seqs that a step is the first to compute, and how many of their tokens were cached.

        Asked once of each step that vLLM has scheduled, by what it has scheduled.
        """
        self._settle(num_scheduled_tokens)
        taken = tuple(self._admitted), self._num_cached_tokens
        self._admitted, self._num_cached_tokens = [], 0
        return taken

    def take_num_preempted(self) -> int:
        """Preemptions since the last call."""
        taken, self._num_preempted = self._num_preempted, 0
        return taken

    def take_counts(self) -> tuple[float, int, bool]:
        """What came together since the last call.

        Returns the seconds that questions took, how many requests ended, and whether the policy asked for a
        request that vLLM has not got.
        """
        waiting = self._waiting
        taken = self._added_s, self._num_finished, waiting.asked_in_vain
        self._added_s, self._num_finished, waiting.asked_in_vain = 0.0, 0, False
        return taken

    def _end(self, seq: int) -> Any:
        """A request in flight has ended; returns it."""
        request = self.flight.leave(seq)
        self._num_finished += 1
        self.policy.finished(seq, self._num_answer_tokens(seq, request))
        return request

    def _num_answer_tokens(self, seq: int, request: Any) -> int:
        if seq in self._withdrawn:
            self._withdrawn.remove(seq)
            return 0
        return self._view.num_answer_tokens(request)

    def _settle(self, num_scheduled_tokens: Mapping[str, int] | None) -> None:
        """Tells the policy of the request that vLLM took last, if it runs.

        Args:
            num_scheduled_tokens: of the step, once vLLM has added them to what is computed.
        """
        if self._taken is None:
            return
        (request, seq, side), self._taken = self._taken, None
        if not self._view.is_running(request):
            self._waiting.pass_over(seq)
            return
        num_cached_tokens = request.num_computed_tokens
        if num_scheduled_tokens is not None:
            num_cached_tokens -= num_scheduled_tokens[request.request_id]
        if self._preempted:
            self._preempted.pop(seq, None)
        if self.flight.admit(seq, request, side, num_cached_tokens):
            self._admitted.append(seq)
            self._num_cached_tokens += num_cached_tokens
        self._waiting.blocks_changed()
        self.policy.admitted(seq, side, num_cached_tokens)

    def _choose(self) -> _Offer | None:
        waiting = self._waiting
        if waiting.refused and (refused := waiting.next_refused()) is not None:
            # vLLM skips it, and ends it with the step.
            return refused, seq_of(refused), LEFT
        if not waiting.by_seq or len(self.flight.by_seq) >= self._limits.max_num_seqs:
            return None
        admission = self.policy.next_request(self)
        if admission is not None:
            request = waiting.by_seq.get(admission.seq)
            if request is not None:
                return request, admission.seq, admission.side
        return None if self.flight.by_seq else self._any_ready()

    def _any_ready(self) -> _Offer | None:
        """What waits and can start, soonest first.

        On the left side, but for what was preempted: which one is the policy's to say, and it named none.
        """
        by_seq = self._waiting.by_seq
        for seq in chain(self.policy.upcoming(len(by_seq)), by_seq):
            if self._waiting.is_ready(seq):
                return by_seq[seq], seq, self._preempted.get(seq, LEFT)
        return None
