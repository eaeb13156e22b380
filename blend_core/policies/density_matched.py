"""Density-matched admission: KV is filled ahead, and a step computes what its KV reading can hide."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice, zip_longest
from typing import ClassVar, Final

from blend_core.plan import Plan
from blend_core.policies.balance import balance_pays
from blend_core.policies.base import FOR_EVER, LEFT, RIGHT, Admission, EngineLimits, EngineView, Side
from blend_core.policies.in_flight import InFlight
from blend_core.policies.ledger import DECODING, FINISHED, PREEMPTED, WAITING, Ledger
from blend_core.policies.left_turn import LeftTurn
from blend_core.policies.look_ahead import LookAhead
from blend_core.policies.matching_rules import MatchingRules
from blend_core.policies.pace import FREE_KV_SHARE, Pace, RunningWork, running_work
from blend_core.policies.queued import QueuedPolicy
from blend_core.policies.request_kind import Work
from blend_core.policies.waiting_sides import WaitingSides

REFRESH_STEPS: Final = 128
"""Steps after which sums that are kept up in between are made anew: rarely enough to cost nothing a step.
There are more where more requests are in flight on the right side, since making them takes time with each."""

FIRST_STEPS: Final = 16
"""Steps after which they are made for the first time: a run's first steps tell the most about it."""

CHUNK_TOKENS: Final = 128
"""Prompt tokens that a step computes at least, if any: an engine takes nearly as long for fewer, and
BlendServe §5.3 computes multiples of them."""

LEARNING_GROWTH: Final = 0.02
"""Lengths are learned anew each time the run has become longer by this share."""

ALL_RULES: Final = MatchingRules()
"""What the policy is made of."""


class DensityMatchedPolicy(QueuedPolicy):
    """Takes memory-intensive requests as KV allows and compute-intensive ones as the clock allows.

    The right side are requests whose density is below that of all. The longest goes first, as soon as KV,
    ahead to the end of every answer in flight, stays within its bounds with it (`KvProjection`); one of known
    length may go before its turn into a gap that no longer one fits. What the left side needs is kept free.

    The left side is computed evenly over the steps that KV leaves (`Pace`), more in a step that reads much KV
    and less in one that reads little, so that a step's compute and KV reading stay in the proportion of all
    that is left to do. Then either both sides end together or the one that is longer by itself is never held
    up.

    Where KV holds few requests, the room that this keeps for the left side may be worth more than what it
    gains (`balance_pays`). Then requests start as soon as there is room, the right side's first, and a step
    computes all that it can. Where reading the weights takes longer than computing what is left, or a step
    takes so long anyway that it hides all reading, as on devices with little KV, KV ahead is not looked at:
    it is the number of steps that counts, and one less is worth more than a preemption costs.

    Lengths that are not known are learned from all requests of their kind, ended and running, in mid-run.
    Sampled requests come first on their side.
    """

    name: ClassVar[str] = "density_matched"

    def __init__(self, plan: Plan, limits: EngineLimits, rules: MatchingRules = ALL_RULES) -> None:
        """Takes the first plan; `rules` other than all of them are for a study."""
        self._rules = rules
        self._times = plan.step_times
        ledger = Ledger()
        self._capacity_tokens = limits.num_blocks * limits.block_size
        self._sides = WaitingSides(ledger, plan.step_times, self._capacity_tokens)
        self._in_flight = InFlight(ledger, self._sides)
        # What kinds have still to be told of requests that started or left, oldest first. They are told
        # before anything looks at what waits, what is in flight or lengths, which only a refresh does.
        self._untold: list[Callable[[], None]] = []
        self._decode_kv_tokens = 0
        self._num_decoding = 0
        self._look_ahead = LookAhead(ledger, self._sides, rules)
        self._left_turn = LeftTurn(ledger)
        self._pace = Pace.of(Work(), Work(), RunningWork(), limits, plan.step_times)
        self._balances = False
        self._right_limit_tokens = 0.0
        self._held_up: int | None = None
        self._refresh_at = 0
        self._learn_at = 0
        super().__init__(plan, limits, ledger)

    def begin_step(self, view: EngineView) -> int:
        """As many prompt tokens as this step's KV reading can hide at the pace of the whole.

        They are computed in chunks: too few are saved for a later step. While KV is being filled, the right
        side's prompts may take all that the step has room for.
        """
        num_tokens_at_most = super().begin_step(view)
        ledger = self._ledger
        if ledger.clock >= self._refresh_at:
            self._refresh()
        self._look_ahead.projection.advance(ledger.clock)
        left = self._left_head()
        # Half of what a step can do, so that what was saved in one fits the next.
        chunk_tokens = min(CHUNK_TOKENS, num_tokens_at_most // 2)
        num_tokens, share_reached = float(num_tokens_at_most), 1.0
        if left is not None and self._balances and self._rules.paces and view.num_decoding > 0:
            num_tokens, share_reached = self._pace.prefill_tokens(
                self._times,
                self._decode_kv_tokens,
                ledger.num_tokens[RIGHT],
                self._look_ahead.projection.peak_up_to,
                view.num_decoding,
            )
            if not self._rules.follows_kv:
                num_tokens, share_reached = self._pace.prefill_tokens_per_step, 1.0
            num_tokens = self._left_turn.in_chunks(num_tokens, chunk_tokens)
        self._left_turn.allow(num_tokens)
        self._right_limit_tokens = self._right_limit(view, left)
        candidate = self._look_ahead.look(self._right_head, self._right_limit_tokens, self._refresh_at)
        if candidate is not None:
            num_tokens += (1.0 - share_reached) * num_tokens_at_most
            num_tokens = max(num_tokens, min(chunk_tokens, self._sides.num_own_tokens(candidate)))
        return min(num_tokens_at_most, int(num_tokens))

    def next_request(self, view: EngineView) -> Admission | None:
        """The right side's next if KV ahead allows it, else the left side's if the step's pace does."""
        ledger = self._ledger
        num_running = view.num_running
        # With no blocks nothing fits, which is right where no more requests may run.
        num_blocks = view.num_free_blocks - num_running if num_running < self._limits.max_num_seqs else 0
        right = self._look_ahead.look(self._right_head, self._right_limit_tokens, self._refresh_at)
        is_right_ready = right is not None and view.is_ready(ledger.seq[right])
        left = self._left_head()
        left_waits = (
            left is not None and self._left_turn.is_due_soon(left) and view.is_ready(ledger.seq[left])
        )
        left_fits = left is not None and left_waits and self._fits(view, left, num_blocks)
        if left_waits and not left_fits:
            self._held_up = left
        # KV that the left side waits for is not given to the right side, which could fill it for ever, nor
        # once it is there. Where nothing is balanced the right side goes first: two sides would only push
        # each other's prefixes out of KV.
        may_start_right = is_right_ready and (
            not self._balances or not left_waits or (left_fits and left != self._held_up)
        )
        if right is not None and may_start_right and self._has_room_now(view, right, num_blocks):
            return Admission(ledger.seq[right], RIGHT)
        if left is not None and left_fits and self._left_turn.is_due(left):
            return Admission(ledger.seq[left], LEFT)
        if num_running == 0:
            heads = ((right, RIGHT), (self._right_head(), RIGHT), (left, LEFT))
            for slot, side in reversed(heads) if left is not None and left == self._held_up else heads:
                if slot is not None and view.is_ready(ledger.seq[slot]):
                    return Admission(ledger.seq[slot], side)
        return None

    def quiet_steps(self, view: EngineView) -> int:
        """Steps until sums are made anew; 1 while the left side waits, since its allowance grows each
        step."""
        if self._left_head() is not None:
            return 1
        if self._right_head() is None:
            return FOR_EVER
        return max(1, min(self._refresh_at, self._look_ahead.again_at) - self._ledger.clock)

    def admitted(self, seq: int, side: Side, num_cached_tokens: int) -> None:
        """Counts what is in flight ahead, on the right side, or against the step's allowance, on the left."""
        ledger = self._ledger
        slot = ledger.slot_of[seq]
        if ledger.phase[slot] is WAITING:
            self._untold.append(partial(self._sides.leave, slot))
        charged = ledger.admit(slot, side, num_cached_tokens)
        self._untold.append(partial(self._in_flight.enter, slot, side))
        if side is RIGHT:
            self._look_ahead.start(slot)
        else:
            self._left_turn.start(charged)
        self._settle()

    def decoding(self, seq: int) -> None:
        """The request's prompt is complete; its KV is read from the next step on."""
        slot = self._ledger.slot_of[seq]
        self._ledger.start_decoding(slot)
        self._num_decoding += 1
        self._decode_kv_tokens += self._ledger.num_prefill_tokens(slot)

    def advanced(self, num_steps: int) -> None:
        """Every decoding request grew by `num_steps` output tokens."""
        self._ledger.advance(num_steps)
        self._decode_kv_tokens += self._num_decoding * num_steps

    def prepare(self) -> None:
        """Tells kinds what has happened, and makes sums anew if they are due."""
        self._tell_kinds()
        if self._ledger.clock >= self._refresh_at:
            self._refresh()

    def finished(self, seq: int, num_output_tokens: int) -> None:
        """The request ended, or left the queue; the length of one that ran tells something of its kind."""
        slot = self._ledger.slot_of.get(seq)
        if slot is None:
            return
        phase = self._ledger.phase[slot]
        if phase is FINISHED:
            return
        if slot == self._look_ahead.candidate:
            self._look_ahead.forget(self._ledger.clock)
        if phase is WAITING:
            self._untold.append(partial(self._sides.leave, slot))
        elif phase is not PREEMPTED:
            if num_output_tokens > 0:
                self._untold.append(partial(self._in_flight.observe, slot, num_output_tokens))
            self._vacate(slot)
        if self._ledger.finish(slot):
            self._settle()

    def preempted(self, seq: int) -> None:
        """The request lost its blocks and waits again, at the head of its side."""
        self._vacate(self._ledger.slot_of[seq])
        super().preempted(seq)
        self._look_ahead.forget(self._ledger.clock + 1)
        self._refresh_at = min(self._refresh_at, self._ledger.clock + 1)

    def revise(self, plan: Plan) -> None:
        """Takes a later revision; see `QueuedPolicy`."""
        # By the estimates that were in force until now.
        self._tell_kinds()
        super().revise(plan)

    def _queue(self, plan: Plan, waiting: list[int]) -> list[int]:
        self._times = plan.step_times
        if plan.revision > 0 and not self._rules.learns:
            self._in_flight.learn(counts_running=False)
        self._sides.take(plan, waiting)
        self._start_over()
        return self._sides.left

    def _unstarted(self) -> list[int]:
        return self._sides.unstarted()

    def _sort_anew(self) -> None:
        self._sides.sort()
        self._order = self._sides.left
        self._left, self._right = 0, len(self._order) - 1
        self._start_over()
        self._settle()

    def _start_over(self) -> None:
        self._refresh_at = self._ledger.clock
        self._look_ahead.forget(self._ledger.clock)
        self._left_turn.start_over()

    def _tell_kinds(self) -> None:
        for tell in self._untold:
            tell()
        self._untold.clear()

    def _refresh(self) -> None:
        """Makes projection and pace anew."""
        self._tell_kinds()
        ledger = self._ledger
        clock = ledger.clock
        if self._right_head() is None and 0 < 2 * ledger.num_waiting <= self._sides.num_sorted:
            # What was on the left side has a longer and a shorter end of its own.
            self._sort_anew()
        if clock >= self._learn_at and self._rules.learns:
            self._in_flight.learn(counts_running=self._rules.counts_running)
            if self._sides.is_out_of_order:
                self._sort_anew()
            self._learn_at = clock + _interval(clock, int(LEARNING_GROWTH * clock))
        running = running_work(tuple(self._in_flight.right_side()))
        left_head, longest = self._left_head(), self._sides.longest()
        self._pace = Pace.of(
            self._sides.work(LEFT),
            self._sides.work(RIGHT),
            running,
            self._limits,
            self._times,
            longest_waiting=0.0 if longest is None else self._sides.expected_tokens(longest),
            left_head=None if left_head is None else self._sides.kind(left_head).work(),
            left_output_tokens=0.0 if left_head is None else self._sides.expected_tokens(left_head),
        )
        self._balances = left_head is not None and self._balance_pays(running)
        looks_ahead = not self._pace.is_step_bound and self._pace.hidden_share > 0.0
        self._look_ahead.renew(running, balances=self._balances, looks_ahead=looks_ahead)
        self._refresh_at = clock + _interval(clock, ledger.num_running[RIGHT])

    def _balance_pays(self, running: RunningWork) -> bool:
        return balance_pays(self._pace, self._sides, self._ledger, running, self._limits)

    def _right_limit(self, view: EngineView, left: int | None) -> float:
        """KV tokens that the right side may come to in this step."""
        num_used_tokens = self._capacity_tokens - view.num_free_blocks * self._limits.block_size
        other_tokens = float(num_used_tokens - self._ledger.num_tokens[RIGHT])
        # A block for each to grow into, and the next prompt of the left side.
        margin_tokens = float(view.num_running * self._limits.block_size)
        if left is not None and self._balances:
            other_tokens = max(self._pace.left_kv_tokens, other_tokens)
            margin_tokens += self._left_turn.tokens_to_place(view, left, self._limits.block_size)
        return self._capacity_tokens * (1.0 - FREE_KV_SHARE) - other_tokens - margin_tokens

    def _vacate(self, slot: int) -> None:
        """A request in flight leaves."""
        ledger = self._ledger
        self._untold.append(partial(self._in_flight.leave, slot, ledger.side[slot]))
        if ledger.phase[slot] is DECODING:
            self._num_decoding -= 1
            self._decode_kv_tokens -= ledger.num_prompt_tokens[slot] + ledger.num_output_tokens(slot)
        if ledger.side[slot] is RIGHT:
            self._look_ahead.again_at = min(self._look_ahead.again_at, ledger.clock)
        else:
            self._left_turn.leave()

    def _left_head(self) -> int | None:
        preempted = self._ledger.preempted[LEFT]
        if preempted:
            return preempted[0]
        lead = self._sides.first_lead(LEFT)
        if lead is not None:
            return lead
        return self._order[self._left] if self._left <= self._right else None

    def _right_head(self) -> int | None:
        preempted = self._ledger.preempted[RIGHT]
        if preempted:
            return preempted[0]
        lead = self._sides.first_lead(RIGHT)
        return lead if lead is not None else self._sides.longest()

    def _has_room_now(self, view: EngineView, slot: int, num_blocks: int) -> bool:
        """Whether KV has room for a right request: it was looked at ahead when it was found, which may be a
        while ago."""
        num_tokens = self._ledger.num_tokens[RIGHT] + self._sides.num_own_tokens(slot)
        return num_tokens <= self._right_limit_tokens and self._fits(view, slot, num_blocks)

    def _soonest(self) -> Iterator[int]:
        ledger = self._ledger
        heads = [slot for slot in (self._look_ahead.candidate, self._right_head()) if slot is not None]
        right = chain(heads, ledger.preempted[RIGHT], self._sides.right_soonest())
        first = chain(ledger.preempted[LEFT], self._sides.left_leads())
        left = chain(first, islice(self._order, self._left, None))
        seen: set[int] = set()
        for slot in chain.from_iterable(zip_longest(right, left)):
            if slot is not None and slot not in seen and ledger.is_waiting(slot):
                seen.add(slot)
                yield slot


def _interval(clock: int, num_steps: int) -> int:
    """Returns for how many steps sums hold: `num_steps` or `REFRESH_STEPS`, less where the run is young.

    A young run makes them anew each time it has become longer by half.
    """
    return min(FIRST_STEPS + clock // 2, max(REFRESH_STEPS, num_steps))
