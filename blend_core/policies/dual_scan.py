"""The paper's dual scan: two cursors, a memory split by density, and a token credit per side.

To the letter of the paper, but for prefixes longer than any of its workloads has (`DEAR_PREFIX_STEPS`).
"""

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from math import ceil, inf
from typing import ClassVar, Final

from blend_core.performance import DEAR_PREFIX_STEPS
from blend_core.plan import Plan
from blend_core.policies.base import FOR_EVER, LEFT, RIGHT, Admission, EngineLimits, EngineView, Side
from blend_core.policies.ledger import DECODING, PREEMPTED, WAITING
from blend_core.policies.queued import QueuedPolicy
from blend_core.policies.side_account import SideAccount, memory_split

OUTLIVED_FACTOR: Final = 2.0
"""After this many times its estimate a request has outlived it by far (BlendServe §5.4, which names no
number)."""

BATCH_MULTIPLE: Final = 128
"""Batches of multiples of so many tokens suit GPUs (BlendServe §5.3)."""


class DualScanPolicy(QueuedPolicy):
    """Takes compute-intensive requests from the left end and memory-intensive ones from the right end.

    Per side `x`: `M_x` of `memory_split`, `N_x = M_x / (p_x + d_x / 2)` requests in steady state (in tokens),
    and `C_x = N_x p'_x / d_x` prompt tokens per step (BlendServe §5.3). `p_x` and `d_x` are prompt and
    estimated output of the request at the side's cursor; `p'_x` are the prompt tokens that it does not share,
    since only they are computed, while every decode step reads all of them.

    A step prefills `C_L + C_R` tokens, in multiples of 128, so that compute is spread as evenly over steps as
    memory is: what a step computes in one go overlaps with that step's decoding alone. A side starts requests
    while its KV use is under `M_x` and either it holds less than its steady state, `sum (p + d / 2)` of its
    requests under `M_x` (`N_x` requests if all are alike), or its credit is above zero: a start costs the
    tokens it computes, each step gives `C_x` back, and no more than one step's credit is saved up. A share
    above nothing is worth one request at least.

    Left requests are short and may use the room that is kept free for decoding requests to grow, but for one
    block each: where right requests fill KV for a while, `M_L` is still the left side's. Preempted requests
    have paid and need no credit; sampled requests come first on the side that their density puts them on.

    One case that the paper's prompts do not have: a prefix of `DEAR_PREFIX_STEPS` full steps. As long as a
    request in flight holds it, a side's next request behind it starts whatever else the side holds, since it
    takes little room now and would have to compute the prefix again once the others have ended.
    """

    name: ClassVar[str] = "dual_scan"

    def __init__(self, plan: Plan, limits: EngineLimits) -> None:
        self._accounts = {LEFT: SideAccount(), RIGHT: SideAccount()}
        self._deadlines: list[tuple[int, int]] = []
        self._resident_tokens: dict[int, float] = {}
        self._rho = inf
        self._scanned: tuple[int | None, int | None] = (None, None)
        self._may_hold_dear_prefix = False
        self._held_prefix_tokens = DEAR_PREFIX_STEPS * limits.max_num_batched_tokens
        super().__init__(plan, limits)
        for account in self._accounts.values():
            account.charge(0, -account.credit_tokens_per_step)

    def begin_step(self, view: EngineView) -> int:
        """`C_L + C_R` prompt tokens in multiples of 128, or all there is room for once a side has run out."""
        num_tokens_at_most = super().begin_step(view)
        if None in self._scanned:
            return num_tokens_at_most
        left, right = self._accounts[LEFT], self._accounts[RIGHT]
        num_tokens = left.credit_tokens_per_step + right.credit_tokens_per_step
        return min(num_tokens_at_most, max(1, ceil(num_tokens / BATCH_MULTIPLE)) * BATCH_MULTIPLE)

    def next_request(self, view: EngineView) -> Admission | None:
        """The head of the side that uses less of its share, if a side may start one. Does not mutate."""
        num_running = view.num_running
        if num_running >= self._limits.max_num_seqs:
            return None
        ledger, accounts = self._ledger, self._accounts
        sides = self._emptier_first()
        # Written out: a list of those that are ready costs more than the rest of a question. The second
        # side's next request is asked for only where the first side's does not start.
        if self._may_hold_dear_prefix:
            for side in sides:
                head = accounts[side].head
                if (
                    head is not None
                    and view.is_ready(ledger.seq[head])
                    and self._is_prefix_held(view, head)
                    and self._is_placeable(view, side, head, num_running)
                ):
                    return Admission(ledger.seq[head], side)
        for side in sides:
            head = accounts[side].head
            if (
                head is not None
                and view.is_ready(ledger.seq[head])
                and self._may_start(side, head)
                and self._is_placeable(view, side, head, num_running)
            ):
                return Admission(ledger.seq[head], side)
        if num_running == 0:
            for side in sides:
                head = accounts[side].head
                if head is not None and view.is_ready(ledger.seq[head]):
                    return Admission(ledger.seq[head], side)
        return None

    def quiet_steps(self, view: EngineView) -> int:
        """Steps until a side's credit or an outlived estimate can open a gate."""
        quiet = self._deadlines[0][0] - self._ledger.clock if self._deadlines else FOR_EVER
        for side, account in self._accounts.items():
            head = account.head
            if head is not None and not self._is_full(side) and not self._may_start(side, head):
                quiet = min(quiet, account.quiet_steps(self._ledger.clock))
        return max(1, quiet)

    def admitted(self, seq: int, side: Side, num_cached_tokens: int) -> None:
        """Charges the side's credit with the tokens to compute, unless the request had paid before."""
        ledger, account = self._ledger, self._accounts[side]
        slot = ledger.slot_of[seq]
        first_time = ledger.phase[slot] is WAITING
        charged = ledger.admit(slot, side, num_cached_tokens)
        if first_time:
            account.charge(ledger.clock, charged)
        resident_tokens = ledger.num_prompt_tokens[slot] + ledger.output_tokens[slot] / 2
        self._resident_tokens[slot] = resident_tokens
        account.resident_tokens += resident_tokens
        self._settle()

    def finished(self, seq: int, num_output_tokens: int) -> None:
        """The request ended, or left the queue."""
        self._vacate(seq)
        super().finished(seq, num_output_tokens)

    def preempted(self, seq: int) -> None:
        """The request lost its blocks and waits again, at the head of its side."""
        self._vacate(seq)
        super().preempted(seq)

    def decoding(self, seq: int) -> None:
        """Notes when a left request will have outlived its estimate."""
        slot = self._ledger.slot_of[seq]
        self._ledger.start_decoding(slot)
        if self._ledger.side[slot] is LEFT:
            # Its output grows from the next step on, hence no earlier than after that.
            num_left = OUTLIVED_FACTOR * self._ledger.output_tokens[slot] - self._ledger.num_output_tokens(
                slot
            )
            heappush(self._deadlines, (self._ledger.clock + 1 + max(1, ceil(num_left)), slot))

    def advanced(self, num_steps: int) -> None:
        """Grows what decodes and moves what outlived its estimate by far (BlendServe §5.4)."""
        ledger = self._ledger
        ledger.advance(num_steps)
        while self._deadlines and self._deadlines[0][0] <= ledger.clock:
            _, slot = heappop(self._deadlines)
            # Of a request that was preempted or has ended only an old entry is left here.
            if ledger.phase[slot] is DECODING and ledger.side[slot] is LEFT:
                self._check_deadline(slot)

    def _check_deadline(self, slot: int) -> None:
        """Moves a left request that has outlived its estimate, or notes when it will have."""
        ledger = self._ledger
        num_left = OUTLIVED_FACTOR * ledger.output_tokens[slot] - ledger.num_output_tokens(slot)
        if num_left > 0:
            heappush(self._deadlines, (ledger.clock + ceil(num_left), slot))
            return
        ledger.move(slot, RIGHT)
        self._accounts[LEFT].resident_tokens -= self._resident_tokens[slot]
        self._accounts[RIGHT].resident_tokens += self._resident_tokens[slot]

    def _queue(self, plan: Plan, waiting: list[int]) -> list[int]:
        ledger = self._ledger
        memory_s = float(plan.memory_s.sum())
        self._rho = float(plan.compute_s.sum()) / memory_s if memory_s > 0 else inf
        lead_seqs = set(plan.seq[plan.lead].tolist())
        leads = [slot for slot in waiting if ledger.seq[slot] in lead_seqs]
        self._accounts[LEFT].leads = deque(slot for slot in leads if ledger.density[slot] >= self._rho)
        self._accounts[RIGHT].leads = deque(
            slot for slot in reversed(leads) if ledger.density[slot] < self._rho
        )
        self._scanned = (None, None)
        self._may_hold_dear_prefix = max(ledger.num_prompt_tokens, default=0) >= self._held_prefix_tokens
        return [slot for slot in waiting if ledger.seq[slot] not in lead_seqs]

    def _unstarted(self) -> list[int]:
        leads = [slot for account in self._accounts.values() for slot in account.leads]
        return leads + super()._unstarted()

    def _settle(self) -> None:
        super()._settle()
        left, right = self._accounts[LEFT], self._accounts[RIGHT]
        scanned = self._find_scanned(left, self._left), self._find_scanned(right, self._right)
        if scanned != self._scanned:
            self._scanned = scanned
            self._share_memory(left, right)
        preempted = self._ledger.preempted
        left.head = preempted[LEFT][0] if preempted[LEFT] else scanned[0]
        right.head = preempted[RIGHT][0] if preempted[RIGHT] else scanned[1]

    def _find_scanned(self, account: SideAccount, cursor: int) -> int | None:
        """The side's next request that was never admitted: a lead, or where its cursor stands."""
        leads = account.leads
        while leads and self._ledger.phase[leads[0]] is not WAITING:
            leads.popleft()
        if leads:
            return leads[0]
        return self._order[cursor] if self._left <= self._right else None

    def _share_memory(self, left: SideAccount, right: SideAccount) -> None:
        num_tokens = float(self._limits.num_blocks * self._limits.block_size)
        # A side with nothing left to start needs no share; what it still runs ends by itself.
        # Preempted ones are no measure either: they are where their side was, not where it is.
        scanned_left, scanned_right = self._scanned
        if scanned_left is None or scanned_right is None:
            capacity_left = num_tokens if scanned_left is not None else 0.0
            capacity_right = num_tokens if scanned_right is not None else 0.0
        else:
            density = self._ledger.density
            capacity_left, capacity_right = memory_split(
                num_tokens, density[scanned_left], density[scanned_right], self._rho
            )
        self._set_share(left, scanned_left, capacity_left)
        self._set_share(right, scanned_right, capacity_right)

    def _set_share(self, account: SideAccount, head: int | None, capacity_tokens: float) -> None:
        ledger = self._ledger
        account.capacity_tokens = capacity_tokens
        if head is None or capacity_tokens <= 0:
            account.set_rate(ledger.clock, 0.0)
            return
        num_prompt, num_output = ledger.num_prompt_tokens[head], ledger.output_tokens[head]
        num_steady = max(1.0, capacity_tokens / (num_prompt + num_output / 2))
        num_unshared = max(1, num_prompt - ledger.num_shared_tokens[head])
        account.set_rate(ledger.clock, num_steady * num_unshared / num_output)

    def _emptier_first(self) -> tuple[Side, Side]:
        left = self._accounts[LEFT].capacity_tokens
        right = self._accounts[RIGHT].capacity_tokens
        # Cross-multiplied, so that a share of nothing divides nothing; it comes last.
        tokens = self._ledger.num_tokens
        if left > 0 and tokens[LEFT] * right <= tokens[RIGHT] * left:
            return LEFT, RIGHT
        return RIGHT, LEFT

    def _is_full(self, side: Side) -> bool:
        capacity = self._accounts[side].capacity_tokens
        if capacity <= 0:
            return True
        # A share smaller than one request still holds one, or the side would never run.
        return self._ledger.num_running[side] > 0 and self._ledger.num_tokens[side] >= capacity

    def _is_prefix_held(self, view: EngineView, slot: int) -> bool:
        """Whether a request in flight holds the prefix of one that would be costly to start later."""
        # Looking a prompt up in the cache takes longer than all else here: only one that is long enough.
        if self._ledger.num_prompt_tokens[slot] < self._held_prefix_tokens:
            return False
        num_held_tokens = view.num_held_blocks(self._ledger.seq[slot]) * self._limits.block_size
        return num_held_tokens >= self._held_prefix_tokens

    def _may_start(self, side: Side, head: int) -> bool:
        if self._ledger.phase[head] is PREEMPTED:
            return True
        if self._is_full(side):
            return False
        account = self._accounts[side]
        return (
            account.resident_tokens < account.capacity_tokens or account.credit_tokens(self._ledger.clock) > 0
        )

    def _vacate(self, seq: int) -> None:
        slot = self._ledger.slot_of.get(seq, -1)
        resident_tokens = self._resident_tokens.pop(slot, None)
        if resident_tokens is not None:
            self._accounts[self._ledger.side[slot]].resident_tokens -= resident_tokens

    def _is_placeable(self, view: EngineView, side: Side, slot: int, num_running: int) -> bool:
        num_kept_free = num_running if side is LEFT else self._num_kept_free_blocks
        return self._fits(view, slot, view.num_free_blocks - num_kept_free)

    def _soonest(self) -> Iterator[int]:
        seen: set[int] = set()
        sides = [self._side_soonest(side) for side in Side]
        while sides:
            for waiting in tuple(sides):
                slot = next(waiting, None)
                if slot is None:
                    sides.remove(waiting)
                elif slot not in seen:
                    seen.add(slot)
                    yield slot

    def _side_soonest(self, side: Side) -> Iterator[int]:
        yield from self._ledger.preempted[side]
        yield from (slot for slot in self._accounts[side].leads if self._ledger.phase[slot] is WAITING)
        positions = range(self._left, self._right + 1)
        for position in positions if side is LEFT else reversed(positions):
            slot = self._order[position]
            if self._ledger.phase[slot] is WAITING:
                yield slot
