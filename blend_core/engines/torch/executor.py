"""How the operators of a step are run."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from blend_core.engines.torch.batch import StepBatch
from blend_core.engines.torch.operators import Operator, StepState


class Executor(Protocol):
    """Runs one step."""

    name: str
    overlap: bool

    def execute(self, batch: StepBatch) -> Tensor:
        """Computes `(num_sampled, vocab)` float32 logits; writes the rows' KV into the cache."""


class SequentialExecutor:
    """One operator after the other: no overlap of compute and memory."""

    name = "sequential"
    overlap = False

    __slots__ = ("_operators",)

    def __init__(self, operators: Sequence[Operator]) -> None:
        """Takes the operators in their order."""
        self._operators = tuple(operators)

    def execute(self, batch: StepBatch) -> Tensor:
        """See `Executor`."""
        state = StepState(batch)
        with torch.inference_mode():
            for operator in self._operators:
                operator.run(state)
            return state.logits
