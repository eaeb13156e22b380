"""What the planner reads of a job's prompts, whatever they are given as."""

from typing import Protocol, Self

import numpy as np
import numpy.typing as npt


class PromptSet(Protocol):
    """Prompts and the bounds of their answers. Rows are in any order; none of the methods mutates.

    `RequestArrays` gives prompts as token ids, `SegmentRequests` as paths of segments. Two prompts of a set
    share what they begin with; nothing else about their text matters to a plan.
    """

    @property
    def seq(self) -> npt.NDArray[np.int64]:
        """`(num_requests,)` numbers of the requests, unique."""

    @property
    def num_prompt_tokens(self) -> npt.NDArray[np.int64]:
        """`(num_requests,)` tokens of each prompt, at least 1."""

    @property
    def min_tokens(self) -> npt.NDArray[np.int32]:
        """`(num_requests,)` equal to `max_tokens` where the output length is preset."""

    @property
    def max_tokens(self) -> npt.NDArray[np.int32]:
        """`(num_requests,)` bound of the answer, at least 1."""

    def __len__(self) -> int: ...

    def take(self, rows: npt.NDArray[np.int64], /) -> Self:
        """Returns a copy with the named rows only, in that order."""

    def lexical_order(self) -> npt.NDArray[np.int64]:
        """Returns `(num_requests,)` rows in lexical order of the prompts, equal prompts by `seq`."""

    def shared_with_previous(self, order: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int64]:
        """Returns `(len(order),)` leading tokens that each row of `order` shares with the row before it.

        In whole blocks, and never the whole prompt; the first row shares 0.
        """
