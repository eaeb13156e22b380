"""Requests given as paths of prompt segments instead of token ids, as block-hash traces are."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blend_core.errors import PlanError
from blend_core.prompt_order import common_segments, order_of_segments


@dataclass(frozen=True, slots=True, eq=False)
class SegmentRequests:
    """Every request of a workload as a path of segments. Row order carries no meaning.

    Two prompts share exactly their common leading segments. A segment id stands for the same tokens wherever
    it stands, so it always has the same length.

    Attributes:
        seq: `(num_requests,)` int64, unique.
        segment_ids: `(num_segments_in_total,)` int64, the paths one after the other.
        segment_tokens: `(num_segments_in_total,)` int64, tokens of each segment, at least 1.
        offsets: `(num_requests + 1,)` int64; path `i` is `segment_ids[offsets[i]:offsets[i + 1]]`, never
            empty.
        min_tokens: `(num_requests,)` int32. Equal to `max_tokens` where the output length is preset.
        max_tokens: `(num_requests,)` int32, at least 1.
    """

    seq: npt.NDArray[np.int64]
    segment_ids: npt.NDArray[np.int64]
    segment_tokens: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    min_tokens: npt.NDArray[np.int32]
    max_tokens: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.seq)

    @property
    def num_prompt_tokens(self) -> npt.NDArray[np.int64]:
        """`(num_requests,)` prompt tokens of each request."""
        return np.add.reduceat(self.segment_tokens, self.offsets[:-1]) if len(self) else self.seq[:0]

    def take(self, rows: npt.NDArray[np.int64]) -> "SegmentRequests":
        """Returns a copy of the given rows, in that order."""
        lengths = np.diff(self.offsets)[rows]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        flat = np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return SegmentRequests(
            seq=self.seq[rows],
            segment_ids=self.segment_ids[flat],
            segment_tokens=self.segment_tokens[flat],
            offsets=offsets,
            min_tokens=self.min_tokens[rows],
            max_tokens=self.max_tokens[rows],
        )

    def head(self, num_rows: int) -> "SegmentRequests":
        """Returns the first rows as views. Does not mutate."""
        end = self.offsets[num_rows]
        return SegmentRequests(
            seq=self.seq[:num_rows],
            segment_ids=self.segment_ids[:end],
            segment_tokens=self.segment_tokens[:end],
            offsets=self.offsets[: num_rows + 1],
            min_tokens=self.min_tokens[:num_rows],
            max_tokens=self.max_tokens[:num_rows],
        )

    def lexical_order(self) -> npt.NDArray[np.int64]:
        """Returns `(num_requests,)` rows in lexical order of the segment ids, equal prompts by `seq`."""
        return order_of_segments(self.segment_ids, self.offsets, self.seq)

    def shared_with_previous(self, order: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int64]:
        """Returns `(len(order),)` leading tokens that each row of `order` shares with the row before it.

        In whole blocks, and never the whole prompt; the first row shares 0.
        """
        shared: npt.NDArray[np.int64] = common_segments(
            self.segment_ids, self.segment_tokens, self.offsets, order, block_size
        )
        return shared

    def check_integrity(self) -> None:
        """Checks the invariants of the class.

        Raises:
            PlanError: the first one that does not hold.
        """
        if len(np.unique(self.seq)) != len(self.seq):
            raise PlanError("A request number stands twice in the workload; number its rows anew.")
        if np.any(np.diff(self.offsets) < 1) or self.offsets[0] != 0:
            raise PlanError("A request of the workload has no segment; give each at least one.")
        if np.any(self.segment_tokens < 1):
            raise PlanError("A segment of the workload has no token; give each at least one.")
        order = np.argsort(self.segment_ids, kind="stable")
        same = self.segment_ids[order][1:] == self.segment_ids[order][:-1]
        if np.any(same & (np.diff(self.segment_tokens[order]) != 0)):
            raise PlanError("A segment id has two lengths; give one id to one text.")
