"""How fast and how small planning is: a made-up job of token ids, planned for dual scan.

Planning runs in a fresh process, so that its peak memory is its own. The job is planned for Llama-3.1-8B on
an A100 with blocks of 16 tokens, without any sampled length.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from blend_core.errors import PlanError
from flows.bench.plan_data import write_request_shards
from flows.bench.plan_process import PlanFigures, Task


def run_plan_bench(num_requests: int, seed: int, tell: Callable[[str], None]) -> PlanFigures:
    """Makes up a job, plans it in a fresh process, and removes it again.

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
        return _planned(Task(folder, num_requests))


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
