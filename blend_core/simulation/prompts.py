"""Prompts as KV blocks: which leading blocks of a prompt other prompts have as well."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blend_core.request import RequestArrays

_CHUNK_TOKENS = 1 << 22
"""Tokens hashed at a time, so that memory stays flat however many there are."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, eq=False)
class PromptBlocks:
    """Every prompt by its length and the ids of its shared blocks.

    Two prompts have the same block id at the same place exactly where all their tokens up to the end of that
    block are equal (up to the chance of a 64-bit hash collision). Only whole blocks have ids, and only those
    that at least two prompts have; since sharing is of prefixes, they are the leading ones. Rows are those of
    the `RequestArrays`.

    Attributes:
        num_prompt_tokens: `(num_requests,)` int64.
        shared_ids: `(num_shared_in_total,)` int32, ids from 0 without gaps, prompt after prompt.
        offsets: `(num_requests + 1,)` int64 into `shared_ids`.
        num_ids: distinct ids.
    """

    num_prompt_tokens: npt.NDArray[np.int64]
    shared_ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    num_ids: int

    @classmethod
    def of(cls, requests: RequestArrays, block_size: int) -> "PromptBlocks":
        """Finds the shared blocks of all prompts. Deterministic; does not mutate."""
        num_tokens = requests.num_prompt_tokens
        num_blocks = num_tokens // block_size
        hashes = np.concatenate(
            [np.zeros(0, dtype=np.uint64), *_prefix_hashes(requests, num_blocks, block_size)]
        )
        _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        is_shared = counts > 1
        dense = np.cumsum(is_shared) - 1
        shared_here = is_shared[inverse]
        ends = np.concatenate([[0], np.cumsum(shared_here)])
        block_offsets = np.concatenate([[0], np.cumsum(num_blocks)])
        return cls(
            num_prompt_tokens=num_tokens,
            shared_ids=dense[inverse[shared_here]].astype(np.int32),
            offsets=ends[block_offsets].astype(np.int64),
            num_ids=int(is_shared.sum()),
        )

    def num_shared_blocks(self, row: int) -> int:
        """Number of ids of one prompt."""
        return int(self.offsets[row + 1] - self.offsets[row])

    def ids_of(self, row: int) -> list[int]:
        """Shared block ids of one prompt, first block first."""
        ids: list[int] = self.shared_ids[self.offsets[row] : self.offsets[row + 1]].tolist()
        return ids


def _prefix_hashes(
    requests: RequestArrays, num_blocks: npt.NDArray[np.int64], block_size: int
) -> Iterator[npt.NDArray[np.uint64]]:
    """Hashes of every whole-block prefix, in chunks of prompts.

    A block's hash is a sum of mixed (token, place in the block), a prefix's the sum of its blocks' hashes
    mixed with their place: sums of well-mixed words, so that both are one vector operation over all prompts.
    """
    ends = np.cumsum(num_blocks * block_size)
    first = 0
    while first < len(num_blocks):
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + _CHUNK_TOKENS, side="right")))
        counts = num_blocks[first:last]
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        place = np.arange(len(starts)) - starts
        token_at = np.repeat(requests.offsets[first:last], counts) + place * block_size
        tokens = requests.token_ids[token_at[:, None] + np.arange(block_size)].astype(np.uint64)
        with np.errstate(over="ignore"):
            columns = np.arange(1, block_size + 1, dtype=np.uint64) * _GOLDEN
            blocks = _mix(tokens + columns).sum(axis=1, dtype=np.uint64)
            totals = np.cumsum(_mix(blocks + place.astype(np.uint64) * _GOLDEN), dtype=np.uint64)
            before = np.concatenate([np.zeros(1, dtype=np.uint64), totals])[starts]
            yield totals - before
        first = last


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spreads every input bit over the word: the finaliser of SplitMix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
