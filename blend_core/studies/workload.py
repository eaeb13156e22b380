"""A workload: requests, and the answers' true lengths that only a run may show."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from blend_core.performance import compute_s, memory_s, practical_optimum_s
from blend_core.segment_requests import SegmentRequests
from blend_core.specs import DeviceProfile, ModelSpec

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests of a study.

    Attributes:
        name: the workload's name in tables.
        requests: what the planner sees.
        num_output_tokens: `(num_requests,)` true lengths; for the simulator alone.
        data: `real` where the lengths come from a published trace, `generated` otherwise.
    """

    name: str
    requests: SegmentRequests
    num_output_tokens: Ints
    data: str


@dataclass(frozen=True, slots=True)
class WorkloadFigures:
    """What a set of requests amounts to with true lengths and every shared segment once.

    Attributes:
        compute_s: seconds of compute at peak figures.
        memory_s: seconds of KV reading at peak figures.
        prefix_sharing: shared prompt tokens in whole blocks over all prompt tokens.
        optimum_s: the practical optimum.
    """

    compute_s: float
    memory_s: float
    prefix_sharing: float
    optimum_s: float

    @property
    def density(self) -> float:
        """`compute_s / memory_s`; infinite where nothing is read."""
        return self.compute_s / self.memory_s if self.memory_s > 0 else float("inf")


def seen_tokens(requests: SegmentRequests, block_size: int) -> Ints:
    """Returns `(num_requests,)` leading prompt tokens that an earlier row has too, in whole blocks.

    Never the whole prompt. Summed over rows it is what an unlimited cache serves, in any order.
    """
    if len(requests) == 0:
        return np.zeros(0, dtype=np.int64)
    # Codes count up in order of first appearance, by hashing: sorting a million ids takes many times as long.
    codes = pa.array(requests.segment_ids).dictionary_encode().indices.to_numpy()
    first = np.flatnonzero(np.diff(np.maximum.accumulate(codes), prepend=-1))
    row_of = np.repeat(np.arange(len(requests)), np.diff(requests.offsets))
    is_repeat = row_of[first][codes] < row_of
    seen = np.add.reduceat(np.where(is_repeat, requests.segment_tokens, 0), requests.offsets[:-1])
    seen = np.minimum(seen, requests.num_prompt_tokens - 1)
    return np.asarray(seen - seen % block_size, dtype=np.int64)


def workload_figures(
    requests: SegmentRequests,
    num_output_tokens: Ints,
    model: ModelSpec,
    device: DeviceProfile,
    block_size: int,
) -> WorkloadFigures:
    """Returns what the requests amount to; `num_output_tokens` are the true lengths, `(num_requests,)`."""
    prompt = requests.num_prompt_tokens
    shared = seen_tokens(requests, block_size)
    return WorkloadFigures(
        compute_s=float(compute_s(model, device, prompt, num_output_tokens, shared).sum()),
        memory_s=float(memory_s(model, device, prompt, num_output_tokens).sum()),
        prefix_sharing=float(shared.sum() / prompt.sum()),
        optimum_s=practical_optimum_s(model, device, prompt, shared, num_output_tokens),
    )
