"""How fast and how small planning is: a made-up job of token ids, planned for dual scan.

Planning runs in a fresh process, so that its peak memory is its own. The job is planned for Llama-3.1-8B on
an A100 with blocks of 16 tokens, without any sampled length.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from blend_core.errors import PlanError
from flows.bench.plan_data import write_request_shards
from flows.bench.plan_process import PlanFigures, Task


@dataclass(frozen=True, slots=True)
class PlanBench:
    """Figures of planning one job.

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


def run_plan_bench(num_requests: int, seed: int, tell: Callable[[str], None]) -> PlanBench:
    """Make up a job, plan it in a fresh process, and remove it again.

    Args:
        num_requests: requests of the job, about 600 prompt tokens each.
        seed: of the job; the same one gives the same job.
        tell: gets a line about each part of the work.

    Raises:
        PlanError: the planning process failed.
    """
    with tempfile.TemporaryDirectory(prefix="blend-bench-") as folder:
        tell(f"making {num_requests:,} requests")
        write_request_shards(Path(folder), num_requests, seed)
        tell("planning")
        figures = _planned(Task(folder, num_requests))
    return PlanBench(
        num_requests=figures.num_requests,
        num_prompt_tokens=figures.num_prompt_tokens,
        load_s=figures.load_s,
        build_s=figures.build_s,
        transform_s=figures.transform_s,
        total_s=figures.build_s + figures.transform_s,
        peak_rss_bytes=figures.peak_rss_bytes,
        prefix_sharing=figures.prefix_sharing,
        sharing_kept=figures.sharing_kept,
    )


def _planned(task: Task) -> PlanFigures:
    done = subprocess.run(
        [sys.executable, "-m", "flows.bench.plan_process"],
        input=msgspec.json.encode(task),
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode != 0:
        raise PlanError(
            f"The process that measures planning failed with status {done.returncode}; see above, "
            "and give it more memory or fewer requests."
        )
    return msgspec.json.decode(done.stdout, type=PlanFigures)
