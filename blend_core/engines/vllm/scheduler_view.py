"""What our queue and vLLM's scheduler know of one another. No vLLM here."""

from enum import Enum
from typing import Any, Final, Protocol

SEQ_ARGUMENT: Final = "blend_seq"
RUN_ARGUMENT: Final = "blend_run"
"""Where a request says its `seq` and its run: in vLLM's `SamplingParams.extra_args`, as it reaches us."""


class Readiness(Enum):
    """Whether vLLM can start a waiting request now."""

    READY = "ready"
    BLOCKED = "blocked"
    REFUSED = "refused"


class SchedulerView(Protocol):
    """What the queue asks the scheduler whose queue it is."""

    def num_free_blocks(self) -> int:
        """Blocks that no request refers to, in the unit that a policy counts in."""

    def num_held_blocks(self, request: Any) -> int:
        """Cached leading blocks of a waiting request that requests in flight refer to."""

    def readiness(self, request: Any) -> Readiness:
        """Whether a waiting request could start, blocks and budget aside; `REFUSED`: it never will."""

    def is_running(self, request: Any) -> bool:
        """Whether the scheduler runs the request."""

    def num_answer_tokens(self, request: Any) -> int:
        """Tokens of the answer of a request that ended, one that was aborted for its stop string included; 0
        where it was refused or failed."""


def seq_of(request: Any) -> int:
    """The `seq` that a request was queued with."""
    seq: int = request.sampling_params.extra_args[SEQ_ARGUMENT]
    return seq


def run_of(request: Any) -> int:
    """The number of the run that a request was queued for."""
    run: int = request.sampling_params.extra_args[RUN_ARGUMENT]
    return run
