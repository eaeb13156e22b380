"""What was asked back from engines, until they have answered."""

from flows.stages.recalls import Recalls


def test_an_answer_settles_what_it_names_in_the_order_it_was_asked() -> None:
    recalls = Recalls()
    recalls.ask(0, {5: 1, 3: 2, 4: 1}, now_s=10.0)

    assert recalls.settle(0, [3, 4, 5, 9]) == {1: [5, 4], 2: [3]}
    assert recalls.settle(0, [3, 4, 5]) == {}


def test_a_rank_waits_until_all_that_it_is_to_have_is_settled() -> None:
    recalls = Recalls()
    recalls.ask(0, {5: 1, 3: 1}, now_s=10.0)
    assert recalls.is_awaited(1)
    assert not recalls.is_awaited(2)

    recalls.settle(0, [5])
    assert recalls.is_awaited(1)
    assert (recalls.is_asked(0, 3), recalls.is_asked(0, 5)) == (True, False)
    recalls.settle(0)
    assert not recalls.is_awaited(1)


def test_a_later_taker_counts() -> None:
    recalls = Recalls()
    recalls.ask(0, {5: 1}, now_s=10.0)
    recalls.ask(0, {5: 2}, now_s=11.0)

    assert (recalls.is_awaited(1), recalls.is_awaited(2)) == (False, True)
    assert recalls.settle(0) == {2: [5]}
    assert not recalls.is_awaited(2)


def test_an_owner_is_overdue_from_the_first_question_without_an_answer() -> None:
    recalls = Recalls()
    recalls.ask(0, {5: 1}, now_s=10.0)
    recalls.ask(0, {6: 1}, now_s=14.0)
    recalls.ask(2, {7: 1}, now_s=14.0)

    assert recalls.overdue(9.0) == []
    assert recalls.overdue(10.0) == [0]
    recalls.settle(0)
    assert recalls.overdue(13.0) == []
