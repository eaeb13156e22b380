"""A plan: the order of a job's requests and the estimates that the order rests on."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a plan promises. Sharing is a share of prompt tokens at `block_size`; densities are compute/memory.

    Attributes:
        model: `ModelSpec.name` planned for.
        device: `DeviceProfile.name` planned for.
        block_size: tokens of a KV block; only whole blocks are shared.
        num_requests: requests in the plan.
        num_prompt_tokens: prompt tokens of all of them.
        estimated_output_tokens: sum of the estimated answers.
        compute_s: seconds of compute with every shared segment once.
        memory_s: seconds of KV reading.
        density: `compute_s / memory_s`; infinite where nothing is read.
        prefix_sharing_best: unlimited cache, depth-first order.
        prefix_sharing_planned: the plan's order with neighbours sharing, after node splits.
        optimum_s: lower bound of the duration (ALGORITHM §7).
        estimated_duration_s: simulated duration under the planned policy; None where nothing was simulated.
    """

    model: str
    device: str
    block_size: int
    num_requests: int
    num_prompt_tokens: int
    estimated_output_tokens: float
    compute_s: float
    memory_s: float
    density: float
    prefix_sharing_best: float
    prefix_sharing_planned: float
    optimum_s: float
    estimated_duration_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Requests in planned order, left (compute-intensive) to right (memory-intensive).

    A revision covers the requests that had no result when it was made. All arrays are `(num_requests,)`, in
    planned order and read-only.

    Attributes:
        revision: 0 for the first plan of a job; revisions only grow.
        policy: name of the admission policy that the plan is made for.
        summary: what the plan promises.
        seq: int64, each request of the plan once.
        num_prompt_tokens: int32.
        num_shared_tokens: int32, leading prompt tokens shared with the request before it, in whole blocks,
            never the whole prompt.
        max_tokens: int32, bound of the answer.
        estimated_output_tokens: float64, mean of the answer's length `E[d]`.
        estimated_output_tokens_sq: float64, second moment `E[d^2]`.
        compute_s: float64, compute of the request with shared tokens at no cost.
        memory_s: float64.
        lead: bool, requests run first because their lengths are the samples (BlendServe §5.1).
        progress: `(num_points,)` float64 rising from 0 to 1, share of finished work (`compute_s + memory_s`).
        planned_density: `(num_points,)` float64, simulated density of the batch at that share; empty with
            `progress` where nothing was simulated.
    """

    revision: int
    policy: str
    summary: PlanSummary
    seq: npt.NDArray[np.int64]
    num_prompt_tokens: npt.NDArray[np.int32]
    num_shared_tokens: npt.NDArray[np.int32]
    max_tokens: npt.NDArray[np.int32]
    estimated_output_tokens: npt.NDArray[np.float64]
    estimated_output_tokens_sq: npt.NDArray[np.float64]
    compute_s: npt.NDArray[np.float64]
    memory_s: npt.NDArray[np.float64]
    lead: npt.NDArray[np.bool_]
    progress: npt.NDArray[np.float64]
    planned_density: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.seq)
