"""Which request of the memory-intensive side may start, and what is kept of those that did."""

from dataclasses import replace

import numpy as np
import pytest
from hand_engine import dense

from blend_core.length_distribution import LENGTH_GRID, LENGTH_GRID_ENDS
from blend_core.policies.base import Side
from blend_core.policies.ledger import Ledger
from blend_core.policies.look_ahead import LookAhead
from blend_core.policies.matching_rules import MatchingRules
from blend_core.policies.pace import RunningWork
from blend_core.policies.waiting_sides import WaitingSides

ALL_RULES = MatchingRules()
REFRESH_AT = 50

SHORT, LONG, MIDDLE = 0, 1, 2
ROWS = [(SHORT, 20, 64), (LONG, 20, 480), (MIDDLE, 20, 152), *dense(200, first=1_000)]
"""Seqs are slots as well. An answer of 64 tokens ends with a bin of the grid, so that it counts exactly."""

SHORT_AT_ITS_END = 20 + 64


class Right:
    """The right side of a plan, and what looks ahead for it."""

    def __init__(self, plan, rules=ALL_RULES):
        self.ledger = Ledger()
        self.sides = WaitingSides(self.ledger, plan.step_times, 0)
        self.sides.take(plan, self.ledger.take(plan))
        self.ahead = LookAhead(self.ledger, self.sides, rules)
        # Something else of the side is in flight, so small that it does not count.
        self.ledger.num_running[Side.RIGHT] = 1

    def look(self, head, limit_tokens):
        found = self.ahead.look(lambda: head, limit_tokens, REFRESH_AT)
        assert found == self.ahead.candidate
        return found

    def admit(self, slot):
        self.sides.leave(slot)
        self.ledger.admit(slot, Side.RIGHT, 0)
        self.ahead.start(slot)


@pytest.fixture
def right_of(make_plan):
    def right(rules=ALL_RULES, rows=ROWS, **options):
        return Right(make_plan([(*row, 1.0) for row in rows], **options), rules)

    return right


def test_a_request_may_start_where_kv_has_room_up_to_the_end_of_its_answer(right_of):
    assert right_of().look(SHORT, SHORT_AT_ITS_END) == SHORT
    assert right_of().look(SHORT, SHORT_AT_ITS_END - 1) is None
    assert right_of(replace(ALL_RULES, looks_ahead=False)).look(SHORT, 0) == SHORT
    assert right_of().look(None, 1e9) is None


def test_a_request_that_has_no_room_by_itself_starts_once_the_side_has_nothing_in_flight(right_of):
    right = right_of(replace(ALL_RULES, fills_gaps=False))
    assert right.look(LONG, 100) is None
    right.ledger.num_running[Side.RIGHT] = 0
    right.ahead.forget(right.ledger.clock)
    assert right.look(LONG, 100) == LONG


def test_what_was_found_stays_found_and_what_was_not_is_looked_for_after_the_next_refresh(right_of):
    right = right_of()
    assert right.look(SHORT, SHORT_AT_ITS_END) == SHORT
    assert right.look(LONG, 0) == SHORT
    right = right_of()
    assert right.look(SHORT, 0) is None
    right.ledger.advance(REFRESH_AT - 1)
    assert right.look(SHORT, 1_000) is None
    right.ledger.advance(1)
    assert right.look(SHORT, 1_000) == SHORT


def test_what_did_not_fit_is_looked_at_again_once_sums_are_made_anew_in_the_same_step(right_of):
    right = right_of(replace(ALL_RULES, fills_gaps=False))
    right.look(LONG, 1_000)
    right.admit(LONG)
    assert right.look(SHORT, SHORT_AT_ITS_END) is None
    right.ahead.renew(RunningWork(), balances=True, looks_ahead=True)
    assert right.look(SHORT, SHORT_AT_ITS_END) == SHORT


def test_what_is_forgotten_is_looked_for_from_the_step_on_that_is_named(right_of):
    right = right_of()
    right.look(SHORT, 1_000)
    right.ahead.forget(right.ledger.clock + 1)
    assert right.look(SHORT, 1_000) is None
    right.ledger.advance(1)
    assert right.look(SHORT, 1_000) == SHORT


def test_the_longest_that_fits_the_gap_goes_before_a_head_that_does_not(right_of):
    assert right_of().look(LONG, 300) == MIDDLE
    assert right_of().look(LONG, 100) == SHORT
    assert right_of().look(LONG, SHORT_AT_ITS_END - 1) is None
    assert right_of(replace(ALL_RULES, fills_gaps=False)).look(LONG, 300) is None


def test_one_whose_prompt_is_too_large_for_the_gap_does_not_go_into_it(right_of):
    rows = [(MIDDLE, 250, 152) if seq == MIDDLE else (seq, *row) for seq, *row in ROWS]
    assert right_of(rows=rows).look(LONG, 300) is None
    assert right_of(rows=rows).look(LONG, 450) == MIDDLE


def test_nothing_goes_before_a_sample(right_of):
    assert right_of(lead=[LONG]).look(LONG, 300) is None


def test_nothing_goes_before_a_request_that_was_preempted(right_of):
    right = right_of()
    right.admit(LONG)
    right.ledger.preempt(LONG)
    right.ahead.renew(RunningWork(), balances=True, looks_ahead=True)
    assert right.look(LONG, 300) is None


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_one_that_starts_is_held_ahead_until_its_end_looked_at_or_not(right_of, is_looked_at):
    right = right_of()
    if is_looked_at:
        right.look(SHORT, 1_000)
    right.admit(SHORT)
    held = (20 + LENGTH_GRID_ENDS) * (LENGTH_GRID < 64)
    assert right.ahead.projection.mean.tolist() == held.tolist()
    assert right.ahead.candidate is None
    # The next one is looked for at once.
    assert right.look(MIDDLE, 300) == MIDDLE


@pytest.mark.parametrize(
    ("rules", "balances", "deviations"),
    [
        (ALL_RULES, True, 1.5),
        (ALL_RULES, False, -6.0),
        (replace(ALL_RULES, keeps_deviations=False), True, 0.0),
    ],
)
def test_room_for_longer_answers_is_kept_where_two_sides_share_kv(right_of, rules, balances, deviations):
    right = right_of(replace(rules, fills_gaps=False))
    mean, spread = np.full(len(LENGTH_GRID), 1_000.0), np.full(len(LENGTH_GRID), 10.0)
    needed = 1_000 + deviations * 10 + SHORT_AT_ITS_END
    for limit, found in ((needed - 1, None), (needed, SHORT)):
        right.ahead.renew(
            RunningWork(kv_mean=mean, kv_variance=spread**2), balances=balances, looks_ahead=True
        )
        assert right.look(SHORT, limit) == found


def test_one_that_was_looked_at_before_sums_were_made_anew_is_held_all_the_same(right_of):
    right = right_of()
    right.look(SHORT, 1_000)
    right.ahead.renew(RunningWork(), balances=True, looks_ahead=False)
    right.look(SHORT, 1_000)
    right.admit(SHORT)
    assert right.ahead.projection.peak_up_to(1) == 1
