"""The contract between an admission policy and whatever executes its decisions.

One policy object serves every engine: the simulator, the torch engine and the vLLM plug-in drive it with the
same calls, so what is proven in simulation is what runs. A policy is pure Python, owns no clock and no
tensor, and knows requests only by `seq` and by the plan's estimates.

The calls of one step, in order::

    budget = policy.begin_step(view)              # prompt tokens that this step may prefill
    while room for another request:
        admission = policy.next_request(view)     # None: not now
        policy.admitted(...)                      # exactly one per admission that the engine could place
    ...one forward pass...
    policy.decoding(seq)                          # for each prompt that was completed in this step
    policy.advanced(1)                            # requests that decoded BEFORE this step grew by one
    policy.prepare()                              # optional, see there
    policy.finished(seq, ...)                     # for each request that ended in this step, 0: no answer
    policy.preempted(seq)                         # whenever the engine had to take a request's blocks away

The request whose prompt completes in a step gets its first output token from that same step; `decoding` says
so, and `advanced` counts only the ones after it. An engine that learns later than it schedules what ends may
call `decoding` and `advanced` as soon as it has scheduled a step, and `prepare` while it is computed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final, NamedTuple, Protocol

from blend_core.plan import Plan

FOR_EVER: Final = 1 << 30
"""A number of steps longer than any run."""


class Side(StrEnum):
    """From which end of the plan a request was taken."""

    LEFT = "left"
    RIGHT = "right"

    # That of an enumeration is computed in Python, and sides are looked up many times a step.
    __hash__ = str.__hash__


# By themselves: before Python 3.12 an enumeration's class takes ten times as long to look one up.
LEFT: Final = Side.LEFT
RIGHT: Final = Side.RIGHT


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine was opened with.

    Attributes:
        block_size: tokens of a KV block.
        num_blocks: KV blocks in all.
        max_num_seqs: requests in flight at most.
        max_num_batched_tokens: prompt and decode tokens of one step at most.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int


class Admission(NamedTuple):
    """The request to admit next and the side whose account it goes on."""

    seq: int
    side: Side


class EngineView(Protocol):
    """What an engine shows to a policy: valid during the call it is passed to, and read only."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks no request in flight refers to, cached ones that may be evicted included.

        A request in flight refers to the blocks of its whole prompt from admission on, computed yet or not.
        """

    @property
    def num_running(self) -> int:
        """Requests in flight."""

    @property
    def num_decoding(self) -> int:
        """Requests in flight whose prompt is complete: each takes one token of the next step."""

    def num_held_blocks(self, seq: int) -> int:
        """Cached leading blocks of a waiting request that requests in flight refer to.

        They cost no free block. A cached block that nobody refers to is a free one, and taking it uses it up.
        """

    def is_ready(self, seq: int) -> bool:
        """Whether the request's token ids have reached the engine, which is fed a bounded window."""


class AdmissionPolicy(ABC):
    """Decides which request starts next, and when.

    Invariants, held by the contract suite in `tests/contract`:
        - every request of the plan is admitted until it has finished, none twice without a preemption
          between;
        - a preempted request is offered before any that was never admitted from its side;
        - when nothing runs and the head of a side is ready, `next_request` returns a request: a gate never
          hangs;
        - when something runs, a request that it names fits the free blocks;
        - the same calls give the same answers: no clock, no randomness outside a seeded generator.
    """

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, plan: Plan, limits: EngineLimits) -> None:
        """Takes the first plan. Raises `PlanError` when the plan was made for another block size."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Requests not in flight and not finished, preempted ones included."""

    @abstractmethod
    def upcoming(self, num_requests: int) -> Sequence[int]:
        """Seqs that may be asked for next, soonest first, from both ends where the policy uses both.

        The engine keeps these at hand. Does not mutate.
        """

    @abstractmethod
    def begin_step(self, view: EngineView) -> int:
        """Starts a step and returns its prompt-token budget, at most `max_num_batched_tokens - num_decoding`.

        Tokens of prompts admitted earlier and not complete yet count against it first. 0 is a step that only
        decodes, which is legal while something decodes.
        """

    @abstractmethod
    def next_request(self, view: EngineView) -> Admission | None:
        """Names the request to admit next, or None for "not now"; asked again, the answer is the same."""

    def quiet_steps(self, view: EngineView) -> int:
        """Steps, at least 1, for which `next_request` goes on answering None while requests only decode.

        Asked by a simulator after it got None, while `max_num_seqs` are in flight, and in a step whose budget
        is 0; it may then call `advanced` once for as many steps. Does not mutate.
        """
        return 1

    @abstractmethod
    def admitted(self, seq: int, side: Side, num_cached_tokens: int) -> None:
        """The request is in flight; `num_cached_tokens` of its prompt came from the cache."""

    @abstractmethod
    def decoding(self, seq: int) -> None:
        """The request's prompt is complete and its first output token is there."""

    @abstractmethod
    def advanced(self, num_steps: int) -> None:
        """Every decoding request grew by `num_steps` output tokens: one call per step, or per jump."""

    def prepare(self) -> None:  # noqa: B027  # most policies have nothing to prepare
        """Does now what the next `begin_step` would take long over, and what may as well be done later.

        Optional: an engine that computes a step elsewhere has time for it. It is called after `advanced` and
        before `finished` of the same step, so that requests which end in this step still count as in flight.
        To call it or not may change decisions, never whether they are right.
        """

    @abstractmethod
    def finished(self, seq: int, num_output_tokens: int) -> None:
        """The request ended with an answer of that many tokens; 0 where it has none.

        One that was withdrawn, that failed or that was too large has none: what it had by then tells nothing
        of how long answers are. Also legal for a waiting request (cancelled, expired or refused before it
        started): it leaves the queue. Without effect for one that has ended already.
        """

    @abstractmethod
    def preempted(self, seq: int) -> None:
        """The request lost its blocks and waits again; its output so far is kept and prefilled as prompt."""

    @abstractmethod
    def revise(self, plan: Plan) -> None:
        """Takes a later revision: a new order and new estimates for what still waits.

        Requests in flight stay in flight; those the new plan does not name keep their old estimates and go
        last. The revision in force may come again with more requests, which a rank took over from another.
        Raises `PlanError` when the revision is earlier than the one in force.
        """
