"""Sorts prompts so that those that begin alike lie together, and measures what neighbours have in common.

Functions over flat arrays: `offsets` is `(num_prompts + 1,)`, and prompt `i` has the tokens or segments
`offsets[i]:offsets[i + 1]`. None mutates its arguments.
"""

from typing import Final

import numba
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
TokenIds = npt.NDArray[np.int32]

_SORT_CHUNK: Final = 4096
"""Prompts whose tokens are turned into bytes at a time."""


def order_of_tokens(token_ids: TokenIds, offsets: Ints, seq: Ints) -> Ints:
    """Returns `(num_prompts,)` prompts in lexical order of their token ids, equal ones by `seq`.

    Prompts are sorted as big-endian bytes: token order becomes byte order, and a prefix comes before what it
    begins.
    """
    num_prompts = len(seq)
    by_seq = np.argsort(seq, kind="stable")
    keys: list[bytes] = [b""] * num_prompts
    # In pieces, so that no second copy of all tokens lies beside the keys.
    for first in range(0, num_prompts, _SORT_CHUNK):
        last = min(first + _SORT_CHUNK, num_prompts)
        base = int(offsets[first])
        piece = token_ids[base : offsets[last]].astype(">i4").tobytes()
        bounds = ((offsets[first : last + 1] - base) * 4).tolist()
        keys[first:last] = [piece[bounds[i] : bounds[i + 1]] for i in range(last - first)]
    return np.array(sorted(by_seq.tolist(), key=keys.__getitem__), dtype=np.int64)


def order_of_segments(segment_ids: Ints, offsets: Ints, seq: Ints) -> Ints:
    """Returns `(num_prompts,)` prompts in lexical order of their segment ids, equal ones by `seq`.

    Place by place of the paths: only prompts that are equal so far are compared further.
    """
    order = np.argsort(seq, kind="stable")
    length = np.diff(offsets)
    # Places in `order` of prompts that have an equal so far, and the group of equals that each is in.
    tied, group = np.arange(len(order)), np.zeros(len(order), dtype=np.int64)
    depth = 0
    while len(tied):
        rows = order[tied]
        goes_on = length[rows] > depth
        segment = np.zeros(len(rows), dtype=np.int64)
        segment[goes_on] = segment_ids[offsets[rows[goes_on]] + depth]
        # What ends here is before all that goes on; its equals are in order of `seq` already.
        by_segment = np.lexsort((segment, goes_on, group))
        order[tied] = rows[by_segment]
        keys = np.stack((group, goes_on, segment))[:, by_segment]
        is_first = np.append((np.diff(keys, prepend=-1) != 0).any(axis=0), True)
        is_first[0] = True
        stays_tied = (keys[1] == 1) & ~(is_first[:-1] & is_first[1:])
        group = np.cumsum(is_first[:-1])[stays_tied]
        tied = tied[stays_tied]
        depth += 1
    return order


@numba.njit(cache=True, nogil=True)
def common_tokens(token_ids: TokenIds, offsets: Ints, order: Ints, block_size: int) -> Ints:
    """Returns `(len(order),)` leading tokens that each prompt of `order` shares with the one before it.

    In whole blocks. At least one token of a prompt is computed, so its last one is never shared.
    """
    shared = np.zeros(len(order), dtype=np.int64)
    for place in range(1, len(order)):
        left, right = offsets[order[place - 1]], offsets[order[place]]
        limit = min(offsets[order[place - 1] + 1] - left, offsets[order[place] + 1] - right - 1)
        common = 0
        while common < limit and token_ids[left + common] == token_ids[right + common]:
            common += 1
        shared[place] = common - common % block_size
    return shared


@numba.njit(cache=True, nogil=True)
def common_segments(
    segment_ids: Ints, segment_tokens: Ints, offsets: Ints, order: Ints, block_size: int
) -> Ints:
    """Returns the same as `common_tokens`, of prompts that share their common leading segments exactly."""
    shared = np.zeros(len(order), dtype=np.int64)
    for place in range(1, len(order)):
        left, right = offsets[order[place - 1]], offsets[order[place]]
        end = offsets[order[place] + 1]
        limit = min(offsets[order[place - 1] + 1] - left, end - right)
        common, tokens = 0, 0
        while common < limit and segment_ids[left + common] == segment_ids[right + common]:
            tokens += segment_tokens[right + common]
            common += 1
        if right + common == end:
            tokens -= 1
        shared[place] = tokens - tokens % block_size
    return shared
