"""A plan: the order of a job's requests and the estimates that the order rests on."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from blend_core.errors import PlanError
from blend_core.performance import StepTimeModel

_COLUMNS: Final[dict[str, Any]] = {
    "seq": np.int64,
    "num_prompt_tokens": np.int32,
    "num_shared_tokens": np.int32,
    "max_tokens": np.int32,
    "estimated_output_tokens": np.float64,
    "estimated_output_tokens_sq": np.float64,
    "compute_s": np.float64,
    "memory_s": np.float64,
    "lead": np.bool_,
    "length_group": np.int32,
}
_METADATA_KEY: Final = b"blend.plan"


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a plan promises. Sharing is a share of prompt tokens at `block_size`; densities are
    compute/memory.

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
        optimum_s: practical optimum of the duration, as of `performance.practical_optimum_s`.
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


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Requests of one kind, and what is known of the lengths of their answers when the plan is made.

    Attributes:
        max_tokens: the largest bound of any, and nearly always that of every one.
        counts: (bin of `LENGTH_GRID`, answers of the kind in it), bins rising; empty where none has run.
    """

    max_tokens: int
    counts: tuple[tuple[int, float], ...] = ()


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
        memory_s: float64; with the spread of the estimates, but for `dual_scan` of mean lengths, as in the
            paper. The summary's always counts the spread.
        lead: bool, requests run first because their lengths are the samples (BlendServe §5.1).
        length_group: int32, place in `length_groups` of requests whose answers are alike; -1 where the length
            is known.
        length_groups: the kinds that `length_group` tells apart.
        step_times: what steps of the planned model take on the planned device.
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
    length_group: npt.NDArray[np.int32]
    length_groups: tuple[LengthGroup, ...]
    step_times: StepTimeModel
    progress: npt.NDArray[np.float64]
    planned_density: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.seq)

    def check_integrity(self) -> None:
        """Checks what the class promises of its arrays and that the summary's counts agree with them.

        Raises:
            PlanError: the first promise that does not hold.
        """
        n = len(self.seq)
        for name, dtype in _COLUMNS.items():
            column = getattr(self, name)
            _require(column.shape == (n,) and column.dtype == dtype, f"{name} is not ({n},) {dtype.__name__}")
            _require(not column.flags.writeable, f"{name} is writable")
        _require(len(np.unique(self.seq)) == n, "seq names a request twice")
        shared = self.num_shared_tokens
        _require(bool(np.all(shared >= 0)), "num_shared_tokens is negative")
        _require(bool(np.all(shared < self.num_prompt_tokens)), "a whole prompt is shared")
        _require(
            bool(np.all(shared[1:] <= self.num_prompt_tokens[:-1])),
            "more is shared than the request before has",
        )
        _require(not np.any(shared[:1]), "the first request shares with nothing")
        _require(not np.any(shared % self.summary.block_size), "num_shared_tokens is not in whole blocks")
        _require(bool(np.all(self.max_tokens >= 1)), "max_tokens is below 1")
        mean, mean_sq = self.estimated_output_tokens, self.estimated_output_tokens_sq
        _require(bool(np.all((mean > 0) & (mean <= self.max_tokens))), "an estimate is not within max_tokens")
        _require(
            bool(np.all(mean_sq >= mean * mean * (1 - 1e-9))), "a second moment is below the squared mean"
        )
        _require(
            bool(np.all(np.isfinite(self.compute_s) & (self.compute_s > 0))), "compute_s is not positive"
        )
        _require(bool(np.all(np.isfinite(self.memory_s) & (self.memory_s >= 0))), "memory_s is negative")
        _require(
            self.progress.shape == self.planned_density.shape, "progress and planned_density differ in length"
        )
        if len(self.progress):
            _require(bool(np.all(np.diff(self.progress) >= 0)), "progress falls")
            _require(bool(self.progress[0] >= 0 and self.progress[-1] <= 1 + 1e-9), "progress leaves 0 to 1")
        _require(self.summary.num_requests == n, "the summary counts other requests")
        group = self.length_group
        _require(
            bool(np.all((group >= -1) & (group < len(self.length_groups)))), "a length group does not exist"
        )
        num_prompt_tokens = int(self.num_prompt_tokens.sum(dtype=np.int64))
        _require(
            self.summary.num_prompt_tokens == num_prompt_tokens, "the summary counts other prompt tokens"
        )

    def to_arrow(self) -> bytes:
        """Returns the plan as an Arrow IPC file. The same plan gives the same bytes. Does not mutate.

        A row per request in planned order; everything else is in the schema's metadata.
        """
        metadata = {
            "revision": self.revision,
            "policy": self.policy,
            "summary": asdict(self.summary),
            "length_groups": [asdict(group) for group in self.length_groups],
            "step_times": asdict(self.step_times),
            "progress": self.progress.tolist(),
            "planned_density": self.planned_density.tolist(),
        }
        table = pa.table(
            {name: pa.array(getattr(self, name)) for name in _COLUMNS},
            metadata={_METADATA_KEY: json.dumps(metadata).encode()},
        )
        sink = pa.BufferOutputStream()
        with pyarrow.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue().to_pybytes()

    @classmethod
    def from_arrow(cls, data: bytes) -> "Plan":
        """Reads what `to_arrow` wrote and checks its integrity.

        Raises:
            PlanError: the bytes are no plan or one that is damaged.
        """
        try:
            table = pyarrow.ipc.open_file(pa.BufferReader(data)).read_all()
            metadata = json.loads((table.schema.metadata or {})[_METADATA_KEY])
            columns = {
                name: frozen(table.column(name).to_numpy().astype(dtype, copy=False))
                for name, dtype in _COLUMNS.items()
            }
            plan = cls(
                revision=metadata["revision"],
                policy=metadata["policy"],
                summary=PlanSummary(**metadata["summary"]),
                length_groups=tuple(_length_group(group) for group in metadata["length_groups"]),
                step_times=StepTimeModel(**metadata["step_times"]),
                progress=frozen(np.array(metadata["progress"], dtype=np.float64)),
                planned_density=frozen(np.array(metadata["planned_density"], dtype=np.float64)),
                **columns,
            )
        except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"The bytes are no plan ({type(error).__name__}); plan the job again.") from error
        plan.check_integrity()
        return plan


def _length_group(stored: dict[str, Any]) -> LengthGroup:
    return LengthGroup(stored["max_tokens"], tuple((place, count) for place, count in stored["counts"]))


def planned_density_at(plan: Plan, share: float) -> float | None:
    """Returns the plan's simulated density at a share of finished work, 0 to 1, between its points by line.

    None where nothing was simulated.
    """
    if not len(plan.progress):
        return None
    return float(np.interp(share, plan.progress, plan.planned_density))


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Makes the array read-only, in place, and returns it."""
    array.flags.writeable = False
    return array


def _require(holds: bool, fault: str) -> None:
    if not holds:
        raise PlanError(f"The plan is damaged ({fault}); plan the job again.")
