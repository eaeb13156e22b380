"""What the scripts of this folder have in common: policies, options with defaults, a run and what is told.

No engine's library is loaded here.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blend_core.engines.base import Engine, EngineInfo, RequestFailed, RequestFinished, StepWindow
from blend_core.planner import PlanConfig, build_plan
from blend_core.tokenizing import Tokenizer
from flows.bench.engine import mixed_requests, request_arrays
from flows.job_source import JobSource

POLICIES = ("fcfs", "dfs", "dual_scan", "density_matched")

HOW_TO_READ = """\
Of each run read

  to_fcfs              output_tokens_per_s over that of fcfs in the same round: above 1 our order is faster
                       than the file's own
  prefix_sharing       share of prompt tokens that came from the cache, 0 to 1; more is better
  num_preempted        fewer is better
  num_failed           must be 0
  added_s_per_step     of vLLM: what a step waits for our part of the scheduler, mean in seconds
  async_scheduling     of vLLM: true on a GPU, where the next step is scheduled while one is computed
"""


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help keeps the lines of the description and says how to read the figures."""
    return argparse.ArgumentParser(
        description=description, epilog=HOW_TO_READ, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_option(to: argparse.ArgumentParser, name: str, default: float | str, meaning: str) -> None:
    """Adds an option of its default's type, whose help tells the default."""
    to.add_argument(name, type=type(default), default=default, help=f"{meaning} (default: %(default)s)")


def answer_questions(
    engine: Engine, info: EngineInfo, policy: str, folder: Path, num_requests: int
) -> dict[str, Any]:
    """Runs the demo's questions on an open engine; returns figures. Planning is not in `busy_s`.

    Args:
        engine: it is left open.
        info: what `open` returned.
        policy: what the engine was made with; the plan is made for it.
        folder: the model's, for its tokenizer.
        num_requests: questions.
    """
    requests = mixed_requests(Tokenizer(folder), num_requests, seed=0)
    config = PlanConfig(policy, info.limits.block_size, sample_fraction=0)
    plan = build_plan(request_arrays(requests), info.model, info.device, config)
    source = JobSource(plan, lambda seqs: [requests[seq] for seq in seqs])
    prompt = cached = output = preempted = prefill = steps = failed = 0
    begin = time.perf_counter()
    for event in engine.run(source):
        if isinstance(event, RequestFinished):
            prompt += event.num_prompt_tokens
            cached += event.num_cached_tokens
            output += event.num_output_tokens
        elif isinstance(event, StepWindow):
            preempted += event.num_preempted
            prefill += event.num_prefill_tokens
            steps += event.num_steps
        elif isinstance(event, RequestFailed):
            failed += 1
    busy_s = time.perf_counter() - begin
    return {
        "policy": policy,
        "busy_s": busy_s,
        "output_tokens_per_s": output / busy_s,
        "total_tokens_per_s": (prompt + output) / busy_s,
        "prefix_sharing": cached / prompt if prompt else 0.0,
        "num_preempted": preempted,
        "num_prefill_tokens": prefill,
        "num_steps": steps,
        "num_failed": failed,
    }


def beside_fcfs(run: dict[str, Any], earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run with `to_fcfs`; rounds begin with `fcfs`, so that the last one before it is of its round."""
    base = next((one for one in reversed([*earlier, run]) if one["policy"] == "fcfs"), run)
    speed = base["output_tokens_per_s"]
    return run | {"to_fcfs": run["output_tokens_per_s"] / speed if speed else 0.0}


def tell(run: dict[str, Any], number: int, num_asked: int) -> None:
    """A line on standard error: a script takes minutes."""
    sys.stderr.write(
        f"{number} of {num_asked}: {run['policy']}, {run['output_tokens_per_s']:,.1f} output tokens/s, "
        f"{run['to_fcfs']:.2f}x fcfs, sharing {run['prefix_sharing']:.1%}, {run['num_preempted']} preempted, "
        f"{run['num_failed']} failed\n"
    )
    sys.stderr.flush()
