"""When the compute-intensive side's next request is due, and the room that its prompt takes."""

import pytest

from blend_core.policies.base import Side
from blend_core.policies.ledger import Ledger
from blend_core.policies.left_turn import LeftTurn

CHUNK_TOKENS = 128
BLOCK_SIZE = 4


@pytest.fixture
def ledger(make_plan):
    ledger = Ledger()
    ledger.take(make_plan([(7, 100, 2, 1.0), (8, 100, 2, 1.0)], shared=[0, 80]))
    return ledger


def test_tokens_too_few_for_a_chunk_are_saved_until_they_make_one(ledger):
    turn = LeftTurn(ledger)
    steps = [turn.in_chunks(50.0, CHUNK_TOKENS) for _ in range(5)]
    assert steps == [0.0, 0.0, 150.0, 0.0, 0.0]
    turn.start_over()
    assert turn.in_chunks(50.0, CHUNK_TOKENS) == 0.0


def test_a_request_is_due_soon_while_tokens_are_saved_and_due_once_they_are_allowed(ledger):
    turn = LeftTurn(ledger)
    assert not turn.is_due_soon(0)
    turn.allow(turn.in_chunks(100.0, CHUNK_TOKENS))
    assert (turn.is_due(0), turn.is_due_soon(0)) == (False, True)
    turn.allow(turn.in_chunks(100.0, CHUNK_TOKENS))
    assert turn.is_due(0)


def test_what_was_started_beyond_the_allowance_is_paid_back_and_what_was_left_over_is_lost(ledger):
    turn = LeftTurn(ledger)
    turn.allow(100.0)
    turn.start(250)
    turn.allow(100.0)
    assert not turn.is_due(0)
    turn.allow(100.0)
    assert turn.is_due(0)
    turn.allow(10.0)
    turn.start(10)
    assert not turn.is_due(0)


def test_a_preempted_request_has_paid(ledger):
    ledger.admit(0, Side.LEFT, 0)
    ledger.preempt(0)
    turn = LeftTurn(ledger)
    assert turn.is_due(0)
    assert not turn.is_due(1)


def test_a_prompt_takes_what_those_in_flight_do_not_hold_and_is_looked_up_once(ledger, view):
    turn = LeftTurn(ledger)
    view.held = {8: 15}
    assert turn.tokens_to_place(view, 1, BLOCK_SIZE) == 100 - 15 * BLOCK_SIZE
    view.held = {8: 20}
    assert turn.tokens_to_place(view, 1, BLOCK_SIZE) == 100 - 15 * BLOCK_SIZE
    for something_changes in (turn.leave, turn.start_over, lambda: turn.start(1)):
        view.held = {8: 5}
        something_changes()
        assert turn.tokens_to_place(view, 1, BLOCK_SIZE) == 100 - 5 * BLOCK_SIZE


@pytest.mark.parametrize("slot", [0, 1])
def test_a_prompt_that_shares_nothing_or_is_not_at_hand_is_not_looked_up(ledger, view, slot):
    view.held, view.absent = {7: 15, 8: 15}, {8}
    assert LeftTurn(ledger).tokens_to_place(view, slot, BLOCK_SIZE) == 100
