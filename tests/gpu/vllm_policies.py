"""The vLLM engine under each policy on a GPU, scheduling ahead: `python tests/gpu/vllm_policies.py`.

Prints one JSON object, a run for each policy and round, and a line on standard error as each run ends.
Every run loads the model anew; after `--limit-s` seconds the runs that are through are printed and the rest
is given up. The exit status is 1 where a request failed or no run is through. Without `--model` a random
Llama is made on the spot, whose speed says nothing of a real one's; give a model that fits the GPU.

`added_s_per_step` of a run is what a step waits for our part of the scheduler, on average, and
`beside_s_per_step` what that part does while the step is computed. With `async_scheduling` both are spent
while the GPU computes, and cost nothing where a step takes longer.

`--device cpu --block-size 32` tries the script itself out, on vLLM for CPUs, which does not schedule ahead.
"""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[2]))

from blend_core.engines.vllm.options import VllmEngineOptions
from blend_core.specs import load_device_profile
from flows.bench.random_llama import make_random_llama
from tests.gpu.policy_runs import POLICIES, add_option, answer_questions, beside_fcfs, parser, tell
from tests.gpu.timed_vllm import TimedVllmProcess


class TimeIsOverError(BaseException):
    """Not an `Exception`: no engine may take it for one of its own."""


def measure(policy: str, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    profile = load_device_profile(asked.device_profile)
    passed: dict[str, object] = {}
    if asked.device != "cpu":
        passed = {"async_scheduling": True, "gpu_memory_utilization": asked.gpu_memory_utilization}
    if asked.kv_blocks:
        passed["num_gpu_blocks_override"] = asked.kv_blocks
    options = VllmEngineOptions(
        model_folder=str(folder),
        policy=policy,
        device_profile=profile,
        device=asked.device,
        block_size=asked.block_size,
        max_num_seqs=asked.max_num_seqs,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        passed=passed,
    )
    engine = TimedVllmProcess(options)
    try:
        info = engine.open()
        figures = answer_questions(engine, info, policy, folder, asked.requests)
        return figures | {
            **engine.scheduler_time.per_step(),
            "async_scheduling": info.details["async_scheduling"] == "true",
            "kv_blocks": info.limits.num_blocks,
        }
    finally:
        engine.close()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, help="Hugging Face folder (default: the random Llama)")
    add_option(options, "--device", "cuda", "cuda, cuda:1 or cpu")
    add_option(options, "--device-profile", "h200", "what plans are reckoned with: by name, or a TOML file")
    add_option(options, "--requests", 256, "at most 264: the demo's prompts")
    add_option(options, "--rounds", 3, "every policy runs once in each")
    add_option(options, "--kv-blocks", 400, "KV in blocks; few, so that order matters; 0 takes all there is")
    add_option(options, "--block-size", 16, "tokens of a KV block; a CPU wants 32")
    add_option(options, "--max-num-seqs", 256, "requests in flight at most")
    add_option(options, "--max-num-batched-tokens", 2048, "tokens of a step at most")
    add_option(options, "--gpu-memory-utilization", 0.9, "share of the GPU's memory that vLLM takes")
    add_option(options, "--limit-s", 1800.0, "seconds after which the rest is given up")
    asked = options.parse_args()
    runs: list[dict[str, Any]] = []
    num_asked = len(POLICIES) * asked.rounds
    signal.signal(signal.SIGALRM, end)
    try:
        with tempfile.TemporaryDirectory() as made:
            signal.setitimer(signal.ITIMER_REAL, asked.limit_s)
            folder = asked.model or make_random_llama(Path(made) / "random-llama")
            for policy in POLICIES * asked.rounds:
                runs.append(beside_fcfs(measure(policy, folder, asked), runs))
                tell(runs[-1], len(runs), num_asked)
    except TimeIsOverError:
        sys.stderr.write(
            f"Time is over after {asked.limit_s:g} s: {len(runs)} of {num_asked} runs are through.\n"
        )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        told = {"model": str(asked.model or "random-llama"), "num_runs_asked": num_asked, "runs": runs}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    sys.exit(0 if runs and not any(run["num_failed"] for run in runs) else 1)


def end(signal_number: int, frame: object) -> NoReturn:
    raise TimeIsOverError


if __name__ == "__main__":
    main()
