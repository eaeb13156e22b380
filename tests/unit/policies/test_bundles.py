"""Requests that share a prefix too dear to compute twice, against a plain search of all ranges."""

from dataclasses import replace

import numpy as np
import pytest
from hand_plan import STEP_TIMES, plan_of
from hypothesis import given
from hypothesis import strategies as st

from blend_core.policies.base import Side
from blend_core.policies.bundles import COPY_SHARE, NO_BUNDLE, Bundles, bundles_of
from blend_core.policies.ledger import Ledger


def plan_sharing(shared, spent_s):
    """A plan of requests that share so many tokens with the one before, and take so long each."""
    rows = [(seq, 10_000, 10, 0.0) for seq in range(len(shared))]
    return replace(plan_of(rows, shared=shared), memory_s=np.array(spent_s, dtype=np.float64))


def plain_bundles(shared, spent_s):
    """Ranges that share a prefix which those around them do not, of which none within another is named."""

    def prefix_s(num_tokens):
        times = STEP_TIMES
        return times.gemm_s_per_token * num_tokens + times.prefill_s_per_token_sq * num_tokens**2

    num = len(shared)
    dear = []
    for first in range(num):
        for end in range(first + 2, num + 1):
            inside = min(shared[first + 1 : end])
            before, behind = shared[first] if first else 0, shared[end] if end < num else 0
            around = max(before, behind)
            copied_s = prefix_s(inside) - prefix_s(around)
            if inside > around and copied_s > COPY_SHARE * sum(spent_s[first:end]):
                dear.append(range(first, end))
    return [
        one
        for one in dear
        if not any(other != one and other.start <= one.start and one.stop <= other.stop for other in dear)
    ]


@given(st.lists(st.tuples(st.sampled_from([0, 16, 1_600, 4_800, 6_400]), st.floats(0.001, 1.0)), min_size=1))
def test_bundles_are_those_of_a_plain_search(rows):
    shared, spent_s = [0, *(row[0] for row in rows[1:])], [row[1] for row in rows]
    assert bundles_of(plan_sharing(shared, spent_s)) == plain_bundles(shared, spent_s)


def test_a_document_with_few_questions_is_a_bundle_and_a_template_of_all_is_none():
    # 16 tokens begin every prompt, and 6,400 those of three documents with two questions each.
    shared = [0, 6_400, 16, 6_400, 16, 6_400]
    plan = plan_sharing(shared, [0.2] * 6)
    assert bundles_of(plan) == [range(0, 2), range(2, 4), range(4, 6)]
    # Where answers take so long that the document is nothing beside them they may part.
    assert bundles_of(plan_sharing(shared, [20.0] * 6)) == []


def test_nothing_shared_is_no_bundle():
    assert bundles_of(plan_sharing([0] * 5, [0.0] * 5)) == []


@pytest.mark.parametrize("side", list(Side))
def test_a_bundle_stays_where_one_of_it_runs_and_goes_where_it_is_told_before_and_after(side):
    ledger = Ledger()
    slots = ledger.take(plan_of([(seq, 100, 10, 0.0) for seq in range(4)]))
    bundles = Bundles([slots[:3]])
    assert [bundles.number_of(slot) for slot in slots] == [0, 0, 0, NO_BUNDLE]
    assert {bundles.side_of(slot) for slot in slots} == {None}
    other = Side.LEFT if side is Side.RIGHT else Side.RIGHT
    asked = []

    def tell(waiting, before):
        asked.append((waiting, before))
        return other

    bundles.sort(ledger, tell)
    ledger.admit(slots[1], side, 0)
    bundles.sort(ledger, tell)
    assert [bundles.side_of(slot) for slot in slots] == [side, side, side, None]
    ledger.finish(slots[1])
    bundles.sort(ledger, tell)
    assert {bundles.side_of(slot) for slot in slots[:3]} == {other}
    assert asked == [(slots[:3], None), ([slots[0], slots[2]], side)]


def test_what_a_bundle_in_flight_holds_is_not_needed_again_by_its_first():
    ledger = Ledger()
    slots = ledger.take(plan_of([(seq, 100, 10, 0.0) for seq in range(4)], shared=[0, 80, 64, 0]))
    bundles = Bundles([slots[:3]])
    assert [bundles.num_held_tokens(slot, ledger) for slot in slots] == [0, 0, 0, 0]
    ledger.admit(slots[2], Side.RIGHT, 0)
    # The others are counted without what they share with the one before them anyway.
    assert [bundles.num_held_tokens(slot, ledger) for slot in slots] == [64, 0, 0, 0]
    ledger.finish(slots[2])
    assert bundles.num_held_tokens(slots[0], ledger) == 0
