"""The torch engine under each policy on a GPU: `python tests/gpu/torch_policies.py`; torch 2.11 or later.

Makes a random Llama on the spot and prints one JSON object, a run for each policy and round, and a line on
standard error as each run ends; a first run, which warms the device up, is not told. It stops starting runs
after `--limit-s` seconds, so that by default it ends within six minutes; needs no network, no vLLM and no
service. The exit status is 1 where a request failed or no run is through.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from blend_core.engines.torch.engine import TorchEngine
from blend_core.engines.torch.options import TorchEngineOptions
from blend_core.specs import load_device_profile
from flows.bench.random_llama import make_random_llama
from tests.gpu.policy_runs import POLICIES, add_option, answer_questions, beside_fcfs, parser, tell

BLOCK_SIZE = 16


def measure(policy: str, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
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
    try:
        figures = answer_questions(engine, engine.open(), policy, folder, asked.requests)
        engine.check_integrity()
        return figures
    finally:
        engine.close()


def main() -> None:
    options = parser(__doc__)
    add_option(
        options, "--device", "cuda" if torch.cuda.is_available() else "cpu", "cuda where there is one; or cpu"
    )
    add_option(options, "--device-profile", "h200", "what plans are reckoned with: by name, or a TOML file")
    add_option(options, "--requests", 128, "at most 264: the demo's prompts")
    add_option(options, "--rounds", 2, "every policy runs once in each")
    add_option(options, "--kv-blocks", 600, "KV in blocks of 16 tokens; few, so that order matters")
    add_option(options, "--max-num-seqs", 32, "requests in flight at most")
    add_option(options, "--max-num-batched-tokens", 512, "tokens of a step at most")
    add_option(options, "--limit-s", 300.0, "seconds after which no run is started")
    asked = options.parse_args()
    begin = time.perf_counter()
    runs: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory() as made:
            folder = make_random_llama(Path(made) / "random-llama")
            # Not told: the first run on a GPU loads kernels, which would flatter those after `fcfs`.
            measure(POLICIES[0], folder, asked)
            for policy in POLICIES * asked.rounds:
                if time.perf_counter() - begin < asked.limit_s:
                    runs.append(beside_fcfs(measure(policy, folder, asked), runs))
                    tell(runs[-1], len(runs), len(POLICIES) * asked.rounds)
    finally:
        told = {"torch": torch.__version__, "device": asked.device, "runs": runs}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    sys.exit(0 if runs and not any(run["num_failed"] for run in runs) else 1)


if __name__ == "__main__":
    main()
