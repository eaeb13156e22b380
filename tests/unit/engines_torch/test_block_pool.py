import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend_core.engines.torch.block_pool import BlockHash, BlockPool, extend_chain


def chain_of(token_ids: list[int], num_blocks: int) -> list[BlockHash]:
    chain: list[BlockHash] = []
    extend_chain(chain, token_ids, 4, num_blocks)
    return chain


def test_a_block_is_named_by_everything_before_it() -> None:
    one, other = chain_of([1, 2, 3, 4, 5, 6, 7, 8], 2), chain_of([9, 2, 3, 4, 5, 6, 7, 8], 2)
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert chain_of([1, 2, 3, 4, 0, 0, 0, 0], 2)[0] == one[0]


def test_released_blocks_are_found_again_until_they_are_evicted() -> None:
    pool = BlockPool(3)
    chain = chain_of(list(range(8)), 2)
    blocks = pool.allocate(2)
    for block, name in zip(blocks, chain, strict=True):
        pool.register(block, name)
    pool.release(blocks)
    assert pool.num_free == 3
    assert pool.match(chain) == blocks

    pool.allocate(2)  # the empty block, then the end of the prompt
    assert pool.match(chain) == blocks[:1]
    pool.check_integrity()


def test_the_longest_unused_block_goes_first() -> None:
    pool = BlockPool(2)
    names = [chain_of([seed] * 4, 1)[0] for seed in (1, 2)]
    first, second = pool.allocate(2)
    for block, name in zip((first, second), names, strict=True):
        pool.register(block, name)
    pool.release([first])
    pool.release([second])
    pool.take([first])
    pool.release([first])

    assert pool.allocate(1) == [second]
    assert pool.match([names[0]]) == [first]


def test_a_shared_block_is_free_when_its_last_reader_leaves() -> None:
    pool = BlockPool(1)
    name = chain_of([1, 1, 1, 1], 1)[0]
    (block,) = pool.allocate(1)
    pool.register(block, name)
    pool.take([block])
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1


def test_a_name_in_use_keeps_its_block() -> None:
    pool = BlockPool(2)
    name = chain_of([1, 1, 1, 1], 1)[0]
    first, second = pool.allocate(2)
    pool.register(first, name)
    pool.register(second, name)
    assert pool.match([name]) == [first]
    pool.check_integrity()


def test_a_lost_reference_is_noticed() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.release([block])
    pool.release([block])
    with pytest.raises(AssertionError):
        pool.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.booleans()), max_size=60))
def test_no_block_is_lost_or_used_twice(steps: list[tuple[int, int, bool]]) -> None:
    """Prompts out of four come and go in any order; blocks always add up."""
    pool = BlockPool(10)
    held: list[list[int]] = []
    for prompt, num_blocks, leave in steps:
        if leave and held:
            pool.release(held.pop(0))
            continue
        chain = chain_of([prompt] * 4 * num_blocks, num_blocks)
        cached = pool.match(chain)
        if num_blocks - len(cached) + pool.num_idle(cached) > pool.num_free:
            continue
        pool.take(cached)
        blocks = cached + pool.allocate(num_blocks - len(cached))
        for block, name in zip(blocks, chain, strict=True):
            pool.register(block, name)
        held.append(blocks)
        assert len(set(blocks)) == num_blocks
        pool.check_integrity()
    for blocks in held:
        pool.release(blocks)
    pool.check_integrity()
    assert pool.num_free == 10
