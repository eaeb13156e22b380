"""The torch engine under each policy on a GPU: `python tests/gpu/torch_policies.py`; torch 2.11 or later.

Makes a random Llama on the spot and prints one JSON object. It stops starting runs after `--limit-s` seconds
(300), so that it ends within six minutes; needs no network, no vLLM and no service. The exit status is 1
where a request failed or no run is through.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from blend_core.engines.base import RequestFailed, RequestFinished, StepWindow
from blend_core.engines.torch.engine import TorchEngine
from blend_core.engines.torch.options import TorchEngineOptions
from blend_core.planner import PlanConfig, build_plan
from blend_core.specs import load_device_profile
from blend_core.tokenizing import Tokenizer
from flows.bench.engine import mixed_requests, request_arrays
from flows.bench.random_llama import make_random_llama
from flows.job_source import JobSource

POLICIES = ("fcfs", "dfs", "dual_scan", "density_matched")
BLOCK_SIZE = 16


def measure(policy: str, folder: Path, asked: argparse.Namespace) -> dict[str, object]:
    engine = TorchEngine(
        TorchEngineOptions(
            model_folder=str(folder),
            policy=policy,
            device_profile=load_device_profile(asked.device_profile),
            dtype="bfloat16" if asked.device != "cpu" else "float32",
            device=asked.device,
            block_size=BLOCK_SIZE,
            num_blocks=asked.kv_blocks,
            max_num_seqs=asked.max_num_seqs,
            max_num_batched_tokens=asked.max_num_batched_tokens,
        )
    )
    info = engine.open()
    requests = mixed_requests(Tokenizer(folder), asked.requests, seed=0)
    config = PlanConfig(policy, BLOCK_SIZE, sample_fraction=0)
    plan = build_plan(request_arrays(requests), info.model, info.device, config)
    begin = time.perf_counter()
    prompt = cached = output = preempted = failed = 0
    for event in engine.run(JobSource(plan, lambda seqs: [requests[seq] for seq in seqs])):
        if isinstance(event, RequestFinished):
            prompt += event.num_prompt_tokens
            cached += event.num_cached_tokens
            output += event.num_output_tokens
        elif isinstance(event, StepWindow):
            preempted += event.num_preempted
        elif isinstance(event, RequestFailed):
            failed += 1
    busy_s = time.perf_counter() - begin
    engine.check_integrity()
    engine.close()
    return {
        "policy": policy,
        "busy_s": busy_s,
        "output_tokens_per_s": output / busy_s,
        "total_tokens_per_s": (prompt + output) / busy_s,
        "prefix_sharing": cached / prompt if prompt else 0.0,
        "num_preempted": preempted,
        "num_failed": failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--device-profile", default="h200")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kv-blocks", type=int, default=600)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--limit-s", type=float, default=300.0)
    asked = parser.parse_args()
    begin = time.perf_counter()
    runs = []
    with tempfile.TemporaryDirectory() as made:
        folder = make_random_llama(Path(made) / "random-llama")
        for policy in POLICIES * asked.rounds:
            if time.perf_counter() - begin < asked.limit_s:
                runs.append(measure(policy, folder, asked))
    told = {"torch": torch.__version__, "device": asked.device, "runs": runs}
    sys.stdout.write(json.dumps(told, indent=2) + "\n")
    sys.exit(0 if runs and not any(run["num_failed"] for run in runs) else 1)


if __name__ == "__main__":
    main()
