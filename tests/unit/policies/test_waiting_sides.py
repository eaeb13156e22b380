"""Sides by density, of requests, kinds and bundles."""

from dataclasses import replace

import numpy as np

from blend_core.policies.base import Side
from blend_core.policies.ledger import Ledger
from blend_core.policies.waiting_sides import WaitingSides

DOCUMENT = 6_400


def sorted_sides(make_plan, requests, spent_s=0.05, num_kv_tokens=0, **options):
    plan = make_plan([(*row, 0.0) for row in requests], **options)
    plan = replace(plan, memory_s=np.full(len(plan), spent_s))
    ledger = Ledger()
    slots = ledger.take(plan)
    sides = WaitingSides(ledger, plan.step_times, num_kv_tokens)
    sides.take(plan, slots)
    return sides, ledger, slots


def sides_of(sides, slots):
    return [sides.kind(slot).side for slot in slots]


def questions(num_documents, outputs):
    """So many documents with a question for each of the answers."""
    num = len(outputs)
    return [
        (document * num + place, DOCUMENT + 60, output)
        for document in range(num_documents)
        for place, output in enumerate(outputs)
    ]


def test_the_questions_on_a_document_are_on_one_side(make_plan):
    # By themselves the first, which computes the document, is dense and the others are not.
    requests = [*questions(10, [8, 8, 8]), *((1_000 + seq, 100, 100) for seq in range(10))]
    shared = [*[0, DOCUMENT, DOCUMENT] * 10, *[0] * 10]
    sides, _, slots = sorted_sides(make_plan, requests, shared=shared)
    assert set(sides_of(sides, slots[:30])) == {Side.LEFT}
    assert set(sides_of(sides, slots[30:])) == {Side.RIGHT}
    # A request of a second each does not miss a document of 0.1 s.
    sides, _, slots = sorted_sides(make_plan, requests, shared=shared, spent_s=1.0)
    assert sides_of(sides, slots[:3]) == [Side.LEFT, Side.RIGHT, Side.RIGHT]


def test_kinds_on_two_sides_are_on_that_of_their_bundle(make_plan):
    # Beside ones that are alone, so that the kinds by themselves are on two sides.
    requests = [
        *questions(10, [10, 10]),
        *((1_000 + seq, 4_000, 10) for seq in range(40)),
        *((2_000 + seq, 30, 10) for seq in range(40)),
    ]
    kinds = [*[0, 1] * 10, *[0] * 40, *[1] * 40]
    sides, _, slots = sorted_sides(make_plan, requests, shared=[*[0, DOCUMENT] * 10, *[0] * 80], kinds=kinds)
    assert set(sides_of(sides, slots[20:60])) == {Side.LEFT}
    assert set(sides_of(sides, slots[60:])) == {Side.RIGHT}
    assert len(set(sides_of(sides, slots[:20]))) == 1
    assert sides.kind(slots[0]).lengths is not sides.kind(slots[1]).lengths
    learned = {
        id(lengths): sum(part.num_waiting for part in parts) for lengths, parts in sides.learning_kinds()
    }
    assert sorted(learned.values()) == [50, 50]


def test_those_of_a_bundle_follow_its_sample(make_plan):
    requests = [*questions(4, [8, 8, 8]), *((1_000 + seq, 100, 100) for seq in range(4))]
    sides, ledger, slots = sorted_sides(
        make_plan, requests, shared=[*[0, DOCUMENT, DOCUMENT] * 4, *[0] * 4], lead=[4, 1_002]
    )
    assert list(sides.left_leads()) == slots[3:6]
    assert sides.first_lead(Side.RIGHT) == slots[14]
    assert sides.left == [*slots[:3], *slots[6:12]]
    for slot in slots[3:6]:
        assert sides.first_lead(Side.LEFT) == slot
        sides.leave(slot)
        ledger.admit(slot, Side.LEFT, 0)
    assert sides.first_lead(Side.LEFT) is None


def test_lengths_are_guessed_while_few_answers_of_most_are_seen(make_plan):
    # 50 of unknown length, expected to be of some 150 tokens, and so many that are known.
    for num_known, guessed in ((0, True), (40, True), (900, False)):
        requests = [(seq, 100, 10) for seq in range(50 + num_known)]
        kinds = [*[0] * 50, *[-1] * num_known]
        sides, _, slots = sorted_sides(make_plan, requests, kinds=kinds)
        assert sides.are_lengths_guessed is guessed
        for _ in range(32):
            sides.kind(slots[0]).lengths.observe(5)
        assert not sides.are_lengths_guessed
    known, _, _ = sorted_sides(make_plan, [(seq, 100, 10) for seq in range(50)])
    assert not known.are_lengths_guessed


def test_a_prefix_that_stays_in_kv_holds_nobody_to_its_side(make_plan):
    requests = [*questions(10, [8, 8, 8]), *((1_000 + seq, 100, 100) for seq in range(10))]
    shared = [*[0, DOCUMENT, DOCUMENT] * 10, *[0] * 10]
    # Prompts of 66,800 tokens without what they share, and answers of 1,240.
    for num_kv_tokens, are_parted in ((68_000, False), (69_000, True)):
        sides, _, slots = sorted_sides(make_plan, requests, shared=shared, num_kv_tokens=num_kv_tokens)
        assert (len(set(sides_of(sides, slots[:3]))) == 2) is are_parted


def test_prompts_are_counted_without_what_they_share(make_plan):
    sides, _, _ = sorted_sides(make_plan, [(0, 400, 2), (1, 600, 2), (2, 10, 900)], shared=[0, 320, 0])
    assert sides.mean_unshared_tokens(Side.LEFT) == 340
    assert sides.mean_unshared_tokens(Side.RIGHT) == 10
