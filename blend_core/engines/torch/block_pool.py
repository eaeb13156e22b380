"""KV blocks as numbers: who refers to them, which are cached, which to evict. No tensor here."""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence

BlockHash = bytes


def extend_chain(chain: list[BlockHash], token_ids: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Appends to `chain` until it names the first `num_blocks` whole blocks of `token_ids`.

    A name stands for a block's tokens and everything before them (128 bits: no two alike in practice).
    """
    while len(chain) < num_blocks:
        start = len(chain) * block_size
        tokens = array("i", token_ids[start : start + block_size]).tobytes()
        chain.append(hashlib.blake2b(tokens, key=chain[-1] if chain else b"", digest_size=16).digest())


class BlockPool:
    """Blocks with reference counts and a least-recently-used cache of those that nobody refers to.

    Invariants (`check_integrity`):
        - a block is free, cached without a reference, or referred to: exactly one of the three;
        - no reference count is negative;
        - a hash names one block and that block knows its hash.
    """

    __slots__ = ("_block_of_hash", "_evictable", "_free", "_hash_of_block", "_num_references")

    def __init__(self, num_blocks: int) -> None:
        self._num_references = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._hash_of_block: list[BlockHash | None] = [None] * num_blocks
        self._block_of_hash: dict[BlockHash, int] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return len(self._num_references)

    @property
    def num_free(self) -> int:
        """Blocks nobody refers to, cached ones included."""
        return len(self._free) + len(self._evictable)

    def match(self, chain: Sequence[BlockHash]) -> list[int]:
        """Blocks that hold the longest cached start of `chain`. Takes no reference."""
        found: list[int] = []
        for name in chain:
            block = self._block_of_hash.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody refers to: those count as free until they are taken."""
        return sum(not self._num_references[block] for block in blocks)

    def take(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each of these cached blocks."""
        for block in blocks:
            if not self._num_references[block]:
                del self._evictable[block]
            self._num_references[block] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes fresh blocks, evicting the longest unused cached ones where no empty one is left.

        The caller has made sure that `num_free` suffices.
        """
        assert num_blocks <= self.num_free, "allocation beyond the free blocks"
        taken: list[int] = []
        for _ in range(num_blocks):
            if self._free:
                block = self._free.popleft()
            else:
                block, _unused = self._evictable.popitem(last=False)
                self._forget(block)
            self._num_references[block] = 1
            taken.append(block)
        return taken

    def register(self, block: int, name: BlockHash) -> None:
        """Lets later requests find a whole block by its name; a name already in use keeps its block."""
        if name not in self._block_of_hash and self._hash_of_block[block] is None:
            self._block_of_hash[name] = block
            self._hash_of_block[block] = name

    def forget(self, blocks: Sequence[int]) -> None:
        """Lets nobody find these blocks any more; the caller refers to them."""
        for block in blocks:
            self._forget(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each block, last one first: a prompt's end is evicted before its start."""
        for block in reversed(blocks):
            self._num_references[block] -= 1
            if not self._num_references[block]:
                if self._hash_of_block[block] is None:
                    self._free.append(block)
                else:
                    self._evictable[block] = None

    def references(self) -> dict[int, int]:
        """Blocks that are referred to, and how often."""
        return {block: count for block, count in enumerate(self._num_references) if count}

    def _forget(self, block: int) -> None:
        name = self._hash_of_block[block]
        if name is not None:
            del self._block_of_hash[name]
            self._hash_of_block[block] = None

    def check_integrity(self) -> None:
        """Raises `AssertionError` where an invariant of the class does not hold."""
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & evictable, "a block is free and cached"
        for block, count in enumerate(self._num_references):
            assert count >= 0, f"block {block} has {count} references"
            assert (count == 0) == (block in free or block in evictable), f"block {block} is lost"
            name = self._hash_of_block[block]
            assert block not in free or name is None, f"free block {block} still has a name"
            assert name is None or self._block_of_hash[name] == block, (
                f"block {block} is not found by its name"
            )
        assert len(self._block_of_hash) == sum(name is not None for name in self._hash_of_block), (
            "stale names"
        )
