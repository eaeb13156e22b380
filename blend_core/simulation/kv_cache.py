"""A block-paged KV cache with reference-counted prefixes and least-recently-used eviction."""

from collections import OrderedDict

from blend_core.simulation.prompts import PromptBlocks


class KvCache:
    """Blocks of one device, as far as a simulation can tell them apart.

    Shared blocks are known by their run (see `PromptBlocks`); the others of a request only by their number,
    since nobody else can use them. Whoever uses a run uses all of it, so that an admission costs as much as
    its path has runs. Blocks that no request in flight refers to stay cached until they are needed, the
    longest unused first and of one prompt the last first, so that what is cached is always a prefix. A
    preempted request finds its own blocks again if they were not needed meanwhile.

    One prompt at a time is incomplete, the one that was given blocks last, until `complete_prompt`.

    Invariants checked by `check_integrity`:
        - empty + evictable + referred to = all blocks, and none of them is negative;
        - of the shared blocks of a prompt those cached or referred to are the leading ones.
    """

    __slots__ = (
        "_copy",
        "_evictable",
        "_held_runs",
        "_num_allocated",
        "_num_prompt_shared",
        "_num_references",
        "_path_of_row",
        "_paths",
        "_run_blocks",
        "block_size",
        "num_blocks",
        "num_empty",
        "num_free",
    )

    def __init__(self, prompts: PromptBlocks, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_empty = num_blocks
        # Blocks that no request in flight refers to, cached ones included.
        self.num_free = num_blocks
        self._paths = prompts.paths
        self._path_of_row: list[int] = prompts.path_of_row.tolist()
        self._run_blocks: list[int] = prompts.run_blocks.tolist()
        self._num_prompt_shared: list[int] = prompts.num_shared_blocks().tolist()
        self._num_references = [0] * len(self._run_blocks)
        # Key: a run, or -1 - row for the blocks that only the row can use; value: leading blocks cached.
        self._evictable: OrderedDict[int, int] = OrderedDict()
        self._held_runs: dict[int, tuple[int, ...]] = {}
        self._num_allocated: dict[int, int] = {}
        # The row of the incomplete prompt and the run that it ends with, where that is cached.
        self._copy: tuple[int, int] | None = None

    def num_held_blocks(self, row: int, num_tokens: int) -> int:
        """Cached leading blocks of a waiting request that others refer to, never all of its tokens."""
        num_hits, num_idle_hits, _ = self._find(row, num_tokens)
        return num_hits - num_idle_hits

    def allocate(self, row: int, num_tokens: int) -> int | None:
        """Gives a request blocks for its tokens; returns the cached ones among the tokens, None where it does
        not fit.

        Mutates only where it fits.
        """
        num_hits, num_idle_hits, num_usable = self._find(row, num_tokens)
        num_needed = -(-num_tokens // self.block_size)
        num_taken = num_needed - num_hits + num_idle_hits
        if num_taken > self.num_free:
            return None
        path = self._paths[self._path_of_row[row]]
        references, evictable = self._num_references, self._evictable
        for run in path[:num_usable]:
            if references[run] == 0:
                self.num_empty += evictable.pop(run, 0)
            references[run] += 1
        self.num_empty += evictable.pop(-1 - row, 0)
        self.num_free -= num_taken
        self._take_empty(num_taken)
        num_held = num_usable
        # The last block of a prompt may be cached and yet not be used: then the prompt has a copy of it,
        # unless it took the very block that was cached.
        self._copy = None
        if num_usable < len(path):
            run = path[num_usable]
            if references[run] == 0 and run not in evictable:
                references[run] = 1
                num_held += 1
            else:
                self._copy = row, run
        self._held_runs[row] = path if num_held == len(path) else path[:num_held]
        self._num_allocated[row] = num_needed
        return num_hits * self.block_size

    def complete_prompt(self) -> None:
        """The incomplete prompt is computed: what of it was cached by then stays a copy."""
        self._copy = None

    def take(self, num_blocks: int) -> None:
        """Uses free blocks up, empty ones first. There must be as many."""
        self.num_free -= num_blocks
        self._take_empty(num_blocks)

    def _take_empty(self, num_blocks: int) -> None:
        """Uses empty blocks up; evicts what is longest unused where there are too few."""
        self.num_empty -= num_blocks
        evictable = self._evictable
        while self.num_empty < 0:
            key, count = next(iter(evictable.items()))
            if count > -self.num_empty:
                evictable[key] = count + self.num_empty
                self.num_empty = 0
                return
            del evictable[key]
            self.num_empty += count
            if self._copy is not None and self._copy[1] == key:
                self._hold_copy(*self._copy)

    def _hold_copy(self, row: int, run: int) -> None:
        """What an incomplete prompt was to copy is cached no more: it will be, from this prompt on."""
        self._copy = None
        self._num_references[run] = 1
        self._held_runs[row] += (run,)

    def release(self, row: int, num_tokens: int) -> None:
        """Ends the use of a request's blocks, of which the first `num_tokens` tokens are computed.

        Whole computed blocks stay cached; the others are empty again.
        """
        if self._copy is not None and self._copy[0] == row:
            self._copy = None
        runs = self._held_runs.pop(row)
        num_whole = num_tokens // self.block_size
        num_blocks = max(self._num_allocated.pop(row), -(-num_tokens // self.block_size))
        run_blocks, references, evictable = self._run_blocks, self._num_references, self._evictable
        end = 0
        for run in runs:
            end += run_blocks[run]
        num_unshared = num_blocks - end
        # From the end of the shared blocks on: a copy of a shared block that is cached already serves nobody.
        num_kept = min(num_unshared, max(0, num_whole - self._num_prompt_shared[row]))
        self.num_free += num_unshared
        self.num_empty += num_unshared - num_kept
        if num_kept:
            evictable[-1 - row] = num_kept
        for run in reversed(runs):
            count = run_blocks[run]
            start = end - count
            references[run] -= 1
            if references[run] == 0:
                self.num_free += count
                num_computed = min(max(num_whole - start, 0), count)
                self.num_empty += count - num_computed
                if num_computed:
                    evictable[run] = num_computed
            end = start

    def _find(self, row: int, num_tokens: int) -> tuple[int, int, int]:
        """Leading blocks in the cache, those of them that nobody refers to, and the runs that may be used."""
        limit = (num_tokens - 1) // self.block_size
        references, evictable, run_blocks = self._num_references, self._evictable, self._run_blocks
        path = self._paths[self._path_of_row[row]]
        num_hits = num_idle_hits = num_usable = num_passed = 0
        is_cached = True
        for run in path:
            count = run_blocks[run]
            num_passed += count
            if num_passed > limit:
                return num_hits, num_idle_hits, num_usable
            num_usable += 1
            if is_cached:
                if references[run] == 0:
                    here = evictable.get(run, 0)
                    is_cached = here == count
                    num_hits += here
                    num_idle_hits += here
                else:
                    num_hits += count
        if is_cached:
            own = min(limit - num_hits, evictable.get(-1 - row, 0))
            num_hits += own
            num_idle_hits += own
        return num_hits, num_idle_hits, num_usable

    def check_integrity(self, num_grown_blocks: int) -> None:
        """Recounts everything. Raises `AssertionError` where something does not add up.

        Args:
            num_grown_blocks: blocks taken for growth by requests that are still in flight.
        """
        assert self.num_empty >= 0
        assert self.num_free == self.num_empty + sum(self._evictable.values())
        references = [0] * len(self._num_references)
        num_referred = num_grown_blocks
        for row, runs in self._held_runs.items():
            num_referred += self._num_allocated[row] - sum(self._run_blocks[run] for run in runs)
            for run in runs:
                references[run] += 1
        assert references == self._num_references
        num_referred += sum(
            count for count, users in zip(self._run_blocks, references, strict=True) if users > 0
        )
        assert self.num_free + num_referred == self.num_blocks
        for path in self._paths:
            num_here = [
                count if users > 0 else self._evictable.get(run, 0)
                for run, count, users in ((run, self._run_blocks[run], references[run]) for run in path)
            ]
            first_gap = next(
                (place for place, run in enumerate(path) if num_here[place] < self._run_blocks[run]),
                len(path),
            )
            assert not any(num_here[first_gap + 1 :])
