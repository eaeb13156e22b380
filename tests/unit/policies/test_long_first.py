"""The order of the memory-intensive side."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from blend_core.length_distribution import LengthDistribution
from blend_core.policies.long_first import LongFirst, Skipping


def long_first(lengths, *, sharing=(), hidden=(), bundles=(), taken=None):
    """Slots 0, 1, … in the order of the scan, of known lengths but for those that `hidden` names, with their
    bounds if it is a dict."""
    taken = set() if taken is None else taken
    bounds = hidden if isinstance(hidden, dict) else dict.fromkeys(hidden, 512)
    told = {slot: LengthDistribution(bound) for slot, bound in bounds.items()}
    number = {slot: number for number, slots in enumerate(bundles) for slot in slots}
    order = LongFirst(
        list(range(len(lengths))),
        lengths_of=told.get,
        is_alone=lambda slot: slot not in sharing and slot not in number,
        bundle_of=lambda slot: number.get(slot, -1),
        output_tokens=lambda slot: float(lengths[slot]),
        is_waiting=lambda slot: slot not in taken,
    )
    return order, taken


def drain(order, taken, lengths):
    """Takes head after head."""
    slots = []
    while (slot := order.head(lambda slot: lengths[slot])) is not None:
        taken.add(slot)
        slots.append(slot)
    return slots


@given(st.lists(st.integers(0, 99), unique=True, max_size=30), st.data())
def test_taken_entries_are_skipped_whatever_the_order_of_taking(slots, data):
    waiting = set(slots)
    skipping = Skipping(list(slots), waiting.__contains__)
    for slot in data.draw(st.permutations(slots)):
        place = data.draw(st.integers(0, len(slots)))
        plain = [other for other in slots if other in waiting]
        assert list(skipping) == plain
        assert skipping.first() == plain[0]
        behind = [other for other in slots[place:] if other in waiting]
        assert skipping.first(place) == (behind[0] if behind else None)
        waiting.discard(slot)
    assert list(skipping) == []
    assert skipping.first() is None


def test_going_over_what_waits_looks_at_nothing_taken_twice():
    looks = Counter()

    def is_waiting(slot):
        looks[slot] += 1
        return slot >= 900

    skipping = Skipping(list(range(1_000)), is_waiting)
    for _ in range(50):
        assert next(iter(skipping)) == 900
    assert max(looks[slot] for slot in range(900)) == 1


@given(st.lists(st.integers(1, 50), max_size=20))
def test_the_longest_comes_first_and_equal_ones_as_planned(lengths):
    order, taken = long_first(lengths)
    expected = sorted(range(len(lengths)), key=lambda slot: (-lengths[slot], slot))
    assert list(order) == expected
    assert drain(order, taken, lengths) == expected


def test_those_behind_one_prefix_stay_together():
    #          alone |  one prefix  | alone
    lengths = [20, 5, 30, 7, 25]
    order, taken = long_first(lengths, sharing={1, 2, 3})
    # The prefix is as long as its longest, and its requests keep the order of the plan.
    assert drain(order, taken, lengths) == [1, 2, 3, 4, 0]


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=20))
def test_neighbours_that_share_come_one_after_another(rows):
    lengths, sharing = [length for length, _ in rows], {slot for slot, row in enumerate(rows) if row[1]}
    order, taken = long_first(lengths, sharing=sharing)
    slots = drain(order, taken, lengths)
    assert sorted(slots) == list(range(len(rows)))
    for slot in sharing:
        if slot + 1 in sharing:
            assert slots.index(slot + 1) == slots.index(slot) + 1


@given(
    st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=20),
    st.sets(st.integers(0, 19)),
    st.floats(0, 60),
)
def test_a_filler_is_the_longest_within_the_bound_that_shares_nothing(rows, taken, most):
    lengths, sharing = [length for length, _ in rows], {slot for slot, row in enumerate(rows) if row[1]}
    order, _ = long_first(lengths, sharing=sharing, taken=taken)
    fitting = [slot for slot in range(len(rows)) if slot not in taken | sharing and lengths[slot] <= most]
    expected = min(fitting, key=lambda slot: (-lengths[slot], slot), default=None)
    assert order.filler(most) == expected


def test_a_filler_is_never_one_of_unknown_length():
    order, _ = long_first([10, 20, 30], hidden={0, 1, 2})
    assert order.filler(1_000) is None


def test_hidden_ones_of_a_bound_come_as_planned_and_with_the_longest_expected_first():
    lengths = [100, 1, 1, 400]
    order, taken = long_first(lengths, hidden={1, 2})
    expected = {0: 100, 1: 200, 2: 200, 3: 400}
    assert drain(order, taken, expected) == [3, 1, 2, 0]


def test_bounds_are_queues_of_their_own():
    order, taken = long_first([1, 1, 1, 1], hidden={0: 64, 1: 4_096, 2: 64, 3: 4_096})
    # Whichever queue is taken from next, its first is among the first.
    assert list(order) == [0, 1, 2, 3]
    assert drain(order, taken, [30, 300, 30, 300]) == [1, 3, 0, 2]


def test_a_bundle_of_several_bounds_is_not_left_before_its_end():
    hidden = {slot: (64, 4_096)[slot % 2] for slot in range(8)}
    order, taken = long_first([1] * 8, hidden=hidden, bundles=[range(4), range(4, 6)])
    # All of a bundle have the turn of the longest; by itself comes what is in none.
    expected = [30, 300] * 4
    assert drain(order, taken, expected) == [0, 1, 2, 3, 4, 5, 7, 6]


def test_a_bundle_keeps_its_turn_when_its_longest_has_gone():
    order, taken = long_first([1, 400, 2, 200], hidden={2: 4_096}, bundles=[[0, 1]])
    assert drain(order, taken, [1, 400, 300, 200]) == [0, 1, 2, 3]
    order, taken = long_first([1, 1, 250], hidden={0: 4_096, 1: 64}, bundles=[[0, 1]])
    assert drain(order, taken, [300, 30, 250]) == [0, 1, 2]


def test_known_and_hidden_ones_of_a_bundle_come_together():
    order, taken = long_first([5, 1, 7, 100], hidden={1: 512}, bundles=[[0, 1, 2]])
    assert drain(order, taken, [5, 200, 7, 100]) == [0, 1, 2, 3]
    order, taken = long_first([5, 1, 7, 100], hidden={1: 512}, bundles=[[0, 1, 2]])
    assert drain(order, taken, [5, 50, 7, 100]) == [3, 0, 1, 2]


def test_nothing_waits_in_an_empty_side():
    order, _ = long_first([])
    assert order.head(lambda slot: 0.0) is None
    assert order.filler(1e9) is None
    assert list(order) == []
