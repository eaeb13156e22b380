"""A block-paged KV cache with reference-counted prefixes and least-recently-used eviction."""

from collections import OrderedDict

from blend_core.simulation.prompts import PromptBlocks


class KvCache:
    """Blocks of one device, as far as a simulation can tell them apart.

    A shared block (see `PromptBlocks`) is known by its id; the others of a request only by their number,
    since nobody else can use them. Blocks that no request in flight refers to stay cached until they are
    needed, the longest unused first and of one prompt the last first, so that what is cached is always a
    prefix. A preempted request finds its own blocks again if they were not needed meanwhile.

    Invariants checked by `check_integrity`:
        - empty + evictable + referred to = all blocks, and none of them is negative;
        - of the shared blocks of a prompt those cached or referred to are the leading ones.
    """

    __slots__ = (
        "_evictable",
        "_held_ids",
        "_num_allocated",
        "_num_evictable",
        "_num_references",
        "_prompts",
        "block_size",
        "num_blocks",
        "num_empty",
    )

    def __init__(self, prompts: PromptBlocks, num_blocks: int, block_size: int) -> None:
        self._prompts = prompts
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_empty = num_blocks
        self._num_references = [0] * prompts.num_ids
        # Key: id of a shared block, or -1 - row for the blocks that only the row can use; value: their
        # number.
        self._evictable: OrderedDict[int, int] = OrderedDict()
        self._num_evictable = 0
        self._held_ids: dict[int, list[int]] = {}
        self._num_allocated: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no request in flight refers to, cached ones included."""
        return self.num_empty + self._num_evictable

    def num_cached_tokens(self, row: int, num_tokens: int) -> int:
        """Leading tokens of a waiting request in the cache, in whole blocks and never all of them."""
        return self._num_hits(row, self._prompts.ids_of(row), num_tokens) * self.block_size

    def allocate(self, row: int, num_tokens: int) -> int | None:
        """Gives a request blocks for its tokens; returns the cached ones among the tokens, None where it does
        not fit.

        Mutates only where it fits.
        """
        ids = self._prompts.ids_of(row)
        num_hits = self._num_hits(row, ids, num_tokens)
        num_shared_hits = min(num_hits, len(ids))
        references, evictable = self._num_references, self._evictable
        num_idle_hits = num_hits - num_shared_hits
        for block in ids[:num_shared_hits]:
            if references[block] == 0:
                num_idle_hits += 1
        num_needed = -(-num_tokens // self.block_size)
        if num_needed - num_hits > self.num_free - num_idle_hits:
            return None
        for block in ids[:num_shared_hits]:
            if references[block] == 0:
                del evictable[block]
                self._num_evictable -= 1
            references[block] += 1
        num_own = evictable.pop(-1 - row, 0)
        self._num_evictable -= num_own
        self.num_empty += num_own - (num_hits - num_shared_hits)
        self.take(num_needed - num_hits)
        held = num_shared_hits
        for block in ids[num_shared_hits:]:
            # The last block of a prompt may be cached and yet not be used, since one token must be computed.
            if references[block] > 0 or block in evictable:
                break
            references[block] = 1
            held += 1
        self._held_ids[row] = ids[:held]
        self._num_allocated[row] = num_needed
        return num_hits * self.block_size

    def take(self, num_blocks: int) -> None:
        """Uses free blocks up, empty ones first. There must be as many."""
        from_empty = min(num_blocks, self.num_empty)
        self.num_empty -= from_empty
        num_blocks -= from_empty
        self._num_evictable -= num_blocks
        evictable = self._evictable
        while num_blocks > 0:
            key, count = next(iter(evictable.items()))
            if count > num_blocks:
                evictable[key] = count - num_blocks
                return
            del evictable[key]
            num_blocks -= count

    def release(self, row: int, num_tokens: int) -> None:
        """Ends the use of a request's blocks, of which the first `num_tokens` tokens are computed.

        Whole computed blocks stay cached; the others are empty again.
        """
        ids = self._held_ids.pop(row)
        num_blocks = max(self._num_allocated.pop(row), -(-num_tokens // self.block_size))
        num_unshared = num_blocks - len(ids)
        num_whole = num_tokens // self.block_size
        # From the end of the shared blocks on: a copy of a shared block that is cached already serves nobody.
        num_kept = min(num_unshared, max(0, num_whole - self._prompts.num_shared_blocks(row)))
        self.num_empty += num_unshared - num_kept
        if num_kept:
            self._evictable[-1 - row] = num_kept
            self._num_evictable += num_kept
        references = self._num_references
        for place in range(len(ids) - 1, -1, -1):
            block = ids[place]
            references[block] -= 1
            if references[block] == 0:
                if place < num_whole:
                    self._evictable[block] = 1
                    self._num_evictable += 1
                else:
                    self.num_empty += 1

    def _num_hits(self, row: int, ids: list[int], num_tokens: int) -> int:
        limit = (num_tokens - 1) // self.block_size
        references, evictable = self._num_references, self._evictable
        num_hits = 0
        for block in ids[:limit]:
            if references[block] == 0 and block not in evictable:
                return num_hits
            num_hits += 1
        return num_hits + min(limit - num_hits, evictable.get(-1 - row, 0))

    def check_integrity(self, num_grown_blocks: int) -> None:
        """Recounts everything. Raises `AssertionError` where something does not add up.

        Args:
            num_grown_blocks: blocks taken for growth by requests that are still in flight.
        """
        assert self._num_evictable == sum(self._evictable.values())
        assert self.num_empty >= 0
        references = [0] * len(self._num_references)
        num_unshared = num_grown_blocks
        for row, ids in self._held_ids.items():
            num_unshared += self._num_allocated[row] - len(ids)
            for block in ids:
                references[block] += 1
        assert references == self._num_references
        num_referred = num_unshared + sum(count > 0 for count in references)
        assert self.num_empty + self._num_evictable + num_referred == self.num_blocks
        for row in range(len(self._prompts.num_prompt_tokens)):
            is_here = [
                references[block] > 0 or block in self._evictable for block in self._prompts.ids_of(row)
            ]
            assert is_here == sorted(is_here, reverse=True)
