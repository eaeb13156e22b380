"""What running requests tell of the lengths of their kind."""

from blend_core.policies.base import Side
from blend_core.policies.in_flight import InFlight
from blend_core.policies.ledger import Ledger
from blend_core.policies.waiting_sides import WaitingSides


def test_answers_that_run_count_also_while_they_are_preempted(make_plan):
    means = []
    for preempts in (False, True):
        plan = make_plan([(seq, 20, 10, 0.0) for seq in range(4)], kinds=[0] * 4)
        ledger = Ledger()
        slots = ledger.take(plan)
        sides = WaitingSides(ledger, plan.step_times, 0)
        sides.take(plan, slots)
        in_flight = InFlight(ledger, sides)
        lengths = sides.kind(slots[0]).lengths
        before = lengths.mean
        for slot in slots[:2]:
            sides.leave(slot)
            ledger.admit(slot, Side.RIGHT, 0)
            in_flight.enter(slot, Side.RIGHT)
            ledger.start_decoding(slot)
        ledger.advance(600)
        if preempts:
            in_flight.leave(slots[0], Side.RIGHT)
            ledger.preempt(slots[0])
        lengths.observe(50)
        in_flight.learn(counts_running=True)
        means.append(lengths.mean)
        assert lengths.mean > before
        in_flight.learn(counts_running=False)
        assert lengths.mean < means[-1]
    # It kept what it had.
    assert means[0] == means[1]
