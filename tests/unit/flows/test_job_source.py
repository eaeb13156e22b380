import threading
from collections.abc import Callable

import numpy as np
import pytest

from blend_core.errors import PlanError
from blend_core.plan import Plan
from blend_core.request import Request, SamplingParams
from flows.job_source import JobSource, part_of_plan, pending_part

MakePlan = Callable[..., Plan]


def make_request(seq: int) -> Request:
    return Request(seq, np.array([seq, seq + 1], dtype=np.int32), SamplingParams(max_tokens=4))


def make_source(plan: Plan) -> JobSource:
    return JobSource(plan, lambda seqs: [make_request(seq) for seq in seqs])


def test_a_source_hands_out_the_plan_and_the_requests_asked_for(make_plan: MakePlan) -> None:
    source = make_source(make_plan())

    assert source.plan().seq.tolist() == [4, 2, 0, 1, 3]
    assert [request.seq for request in source.fetch([3, 1])] == [3, 1]


def test_a_revision_is_handed_out_once(make_plan: MakePlan) -> None:
    source = make_source(make_plan())
    assert source.revision() is None

    source.revise(make_plan(revision=1, seqs=(1, 0)))

    later = source.revision()
    assert later is not None
    assert later.revision == 1
    assert source.revision() is None


def test_only_the_latest_of_two_waiting_revisions_is_handed_out(make_plan: MakePlan) -> None:
    source = make_source(make_plan())
    source.revise(make_plan(revision=1))
    source.revise(make_plan(revision=2))

    later = source.revision()

    assert later is not None
    assert later.revision == 2
    assert source.revision() is None


def test_an_earlier_revision_is_refused(make_plan: MakePlan) -> None:
    source = make_source(make_plan(revision=3))

    with pytest.raises(PlanError, match="revision 3"):
        source.revise(make_plan(revision=2))


def test_the_revision_in_force_may_come_again_with_other_requests(make_plan: MakePlan) -> None:
    source = make_source(make_plan(revision=3, seqs=(1, 0)))

    source.revise(make_plan(revision=3, seqs=(1, 0, 2)))

    again = source.revision()
    assert again is not None
    assert again.seq.tolist() == [1, 0, 2]


def test_a_withdrawn_request_is_told_once_and_left_out_of_later_plans(make_plan: MakePlan) -> None:
    source = make_source(make_plan())

    source.withdraw([2, 0])
    source.withdraw([2])
    source.revise(make_plan(revision=1))

    assert list(source.withdrawn()) == [2, 0]
    assert list(source.withdrawn()) == []
    later = source.revision()
    assert later is not None
    assert later.seq.tolist() == [4, 1, 3]


def test_withdrawals_before_the_start_are_not_in_the_first_plan(make_plan: MakePlan) -> None:
    source = make_source(make_plan())
    source.withdraw([4, 3])

    assert source.plan().seq.tolist() == [2, 0, 1]


def test_withdrawals_from_many_threads_are_all_told_once(make_plan: MakePlan) -> None:
    source = make_source(make_plan())
    threads = [
        threading.Thread(target=source.withdraw, args=(range(start, start + 500),))
        for start in range(0, 4000, 500)
    ]
    told: list[int] = []
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        told.extend(source.withdrawn())
    told.extend(source.withdrawn())

    assert sorted(told) == list(range(4000))


def test_a_part_shares_no_more_than_every_row_between_allows(make_plan: MakePlan) -> None:
    plan = make_plan(shared=(0, 12, 8, 16, 4))

    part = part_of_plan(plan, np.array([True, False, True, False, True]))

    assert part.seq.tolist() == [4, 0, 3]
    assert part.num_shared_tokens.tolist() == [0, 8, 4]
    assert plan.num_shared_tokens.tolist() == [0, 12, 8, 16, 4]


def test_the_first_row_of_a_part_shares_nothing(make_plan: MakePlan) -> None:
    part = part_of_plan(make_plan(shared=(0, 12, 8, 16, 4)), np.array([False, True, True, False, False]))

    assert part.num_shared_tokens.tolist() == [0, 8]


def test_the_pending_part_keeps_order_and_ignores_unknown_requests(make_plan: MakePlan) -> None:
    part = pending_part(make_plan(), [3, 4, 99])

    assert part.seq.tolist() == [4, 3]
    assert not part.seq.flags.writeable


def test_nothing_pending_is_an_empty_plan(make_plan: MakePlan) -> None:
    assert len(pending_part(make_plan(), [])) == 0


def test_everything_pending_is_the_plan_itself(make_plan: MakePlan) -> None:
    plan = make_plan()

    assert pending_part(plan, range(5)) is plan
