"""The process that `blend bench plan` measures: a task on stdin, its figures on stdout."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from blend_core.errors import PlanError
from blend_core.planner import PlanConfig, build_plan, plan_tree
from blend_core.prefix_tree import build_prefix_tree
from blend_core.request import RequestArrays
from blend_core.specs import load_device_profile, model_spec_preset
from flows.bench.ingest_process import peak_rss_bytes
from storage.shard_format import Shard

# Not taken from the studies, which mean the same: their modules would count in the memory that is measured.
_MODEL: Final = "llama-3.1-8b"
_DEVICE: Final = "a100-80g"
_CONFIG: Final = PlanConfig("dual_scan", block_size=16)


class Task(msgspec.Struct, frozen=True):
    """What to plan.

    Attributes:
        folder: of the request shards.
        num_requests: in all of them.
    """

    folder: str
    num_requests: int


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """What planning one job took.

    Attributes:
        num_requests: requests of the job.
        num_prompt_tokens: their prompt tokens.
        load_s: reading the request shards, which are Arrow files in a folder.
        build_s: building the prefix tree.
        transform_s: estimating lengths, sorting, splitting, and summing up.
        total_s: `build_s + transform_s`.
        peak_rss_bytes: peak memory of the planning process, interpreter and libraries included.
        prefix_sharing: share of prompt tokens that neighbours of the planned order share.
        sharing_kept: that as a share of the best there is.
    """

    num_requests: int
    num_prompt_tokens: int
    load_s: float
    build_s: float
    transform_s: float
    total_s: float
    peak_rss_bytes: int
    prefix_sharing: float
    sharing_kept: float


def load_request_shards(folder: Path) -> RequestArrays:
    """Reads the shards of a folder one at a time, so that no token is in memory twice."""
    paths = sorted(folder.glob("*.arrow"))
    lengths = np.concatenate([np.diff(Shard(path).offsets) for path in paths])
    requests = RequestArrays(
        seq=np.empty(len(lengths), dtype=np.int64),
        token_ids=np.empty(lengths.sum(dtype=np.int64), dtype=np.int32),
        offsets=np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
        min_tokens=np.empty(len(lengths), dtype=np.int32),
        max_tokens=np.empty(len(lengths), dtype=np.int32),
    )
    first = 0
    for path in paths:
        shard = Shard(path)
        rows = slice(first, first + len(shard.seq))
        requests.seq[rows] = shard.seq
        requests.token_ids[requests.offsets[rows.start] : requests.offsets[rows.stop]] = shard.tokens
        requests.min_tokens[rows] = shard.column("min_tokens")
        requests.max_tokens[rows] = shard.column("max_tokens")
        first = rows.stop
    return requests


def measure_planning(task: Task) -> PlanFigures:
    """Loads a job, builds its tree, and makes the plan of it.

    Raises:
        PlanError: not every request was planned.
    """
    model, device = model_spec_preset(_MODEL), load_device_profile(_DEVICE)
    # Compiled code is kept on disk, so it is loaded here, or made where it is missing, and not measured.
    build_plan(smallest_job(), model, device, _CONFIG)
    started = time.perf_counter()
    requests = load_request_shards(Path(task.folder))
    loaded = time.perf_counter()
    tree = build_prefix_tree(requests, _CONFIG.block_size)
    built = time.perf_counter()
    plan = plan_tree(requests, tree, model, device, _CONFIG)
    planned = time.perf_counter()
    plan.check_integrity()
    summary = plan.summary
    if summary.num_requests != task.num_requests:
        raise PlanError(
            f"{summary.num_requests} of {task.num_requests} requests were planned; please report it."
        )
    best = summary.prefix_sharing_best
    return PlanFigures(
        num_requests=summary.num_requests,
        num_prompt_tokens=summary.num_prompt_tokens,
        load_s=loaded - started,
        build_s=built - loaded,
        transform_s=planned - built,
        total_s=planned - loaded,
        peak_rss_bytes=peak_rss_bytes(),
        prefix_sharing=summary.prefix_sharing_planned,
        sharing_kept=summary.prefix_sharing_planned / best if best > 0 else 1.0,
    )


def smallest_job() -> RequestArrays:
    """Requests that share, of two densities: enough to go through every part of the planner."""
    num_groups, num_alike, num_tokens = 20, 10, 64
    group, number = np.divmod(np.arange(num_groups * num_alike), num_alike)
    prompts = np.repeat(group[:, None], num_tokens, axis=1)
    prompts[:, -20:] = number[:, None]
    bounds = np.where(number == 0, 3000, 2 + group).astype(np.int32)
    return RequestArrays(
        seq=np.arange(len(group)),
        token_ids=prompts.astype(np.int32).ravel(),
        offsets=np.arange(len(group) + 1) * num_tokens,
        min_tokens=np.zeros(len(group), dtype=np.int32),
        max_tokens=bounds,
    )


if __name__ == "__main__":
    figures = measure_planning(msgspec.json.decode(sys.stdin.buffer.read(), type=Task))
    sys.stdout.buffer.write(msgspec.json.encode(figures))
