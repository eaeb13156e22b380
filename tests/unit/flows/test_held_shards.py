"""Which requests a rank holds, and what another one takes when it has little left to start."""

from flows.stages.held_shards import HeldShards
from storage.shards import Lease


def make_held(*shards: tuple[int, tuple[int, ...]]) -> HeldShards:
    """Shards given as (rank, requests), each request one second of work."""
    held = HeldShards()
    held.estimate({seq: 1.0 for _, seqs in shards for seq in seqs})
    leases = [Lease(0, index, rank, 1) for index, (rank, _) in enumerate(shards)]
    held.assign([seqs for _, seqs in shards], leases)
    return held


def test_what_has_started_is_not_taken() -> None:
    held = make_held((0, (0, 1, 2)), (0, (3, 4)), (1, (5,)))
    held.start(0, [0, 1])

    shard = held.to_take(1, own_s=0.0)

    assert shard is not None
    assert shard.unstarted == [3, 4]
    assert held.unstarted_s(0) == 3.0


def test_nothing_is_taken_that_would_come_back() -> None:
    held = make_held((0, (0, 1)), (1, (2,)))

    # Rank 0 would have nothing left then, and rank 1 what rank 0 has now.
    assert held.to_take(1, own_s=0.0) is None


def test_a_rank_takes_from_the_one_with_most_to_start() -> None:
    held = make_held((0, (0, 1)), (0, (2, 3)), (1, (4, 5)), (1, (6, 7)), (1, (8,)), (2, (9,)))
    held.start(2, [9])

    shard = held.to_take(2, own_s=0.0)

    assert shard is not None
    assert shard.lease.rank == 1


def test_what_waits_is_taken_first_and_whole() -> None:
    held = make_held((0, (0, 1, 2, 3)), (0, (4, 5)), (1, (6, 7)), (2, (8,)))
    held.start(1, [6])
    held.release([Lease(0, 2, 1, 2)])

    shard = held.to_take(2, own_s=0.0)

    assert shard is not None
    assert (shard.lease.fencing_number, shard.unstarted) == (2, [6, 7])
    assert held.holder(6) is None


def test_requests_that_were_moved_are_no_longer_their_first_rank_s() -> None:
    held = make_held((0, (0, 1, 2)), (1, (3,)))

    assert held.taken_from([1, 2]) == [(Lease(0, 0, 0, 1), 2)]
    held.assign([(1, 2)], [Lease(0, 2, 1, 1)])
    held.start(0, [0, 1])

    assert (held.requests_of(0), held.requests_of(1)) == ([0], [3, 1, 2])
    assert held.end(1) == Lease(0, 2, 1, 1)
    assert held.unstarted == [2, 3] or held.unstarted == [3, 2]
    assert (held.unstarted_s(0), held.unstarted_s(1)) == (0.0, 2.0)


def test_a_rank_whose_engine_is_gone_has_started_nothing() -> None:
    held = make_held((0, (0, 1, 2)))
    held.start(0, [0, 1])

    held.idle_again(0)

    assert held.unstarted == [0, 1, 2]
    assert held.unstarted_s(0) == 3.0
