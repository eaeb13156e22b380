"""vLLM as it comes, with its own scheduler: `python plain_vllm.py MODEL FOLDER` answers what FOLDER asks."""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(model: str, folder: Path) -> None:
    from vllm import LLM, SamplingParams

    asked = json.loads((folder / "asked.json").read_text())
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        seed=0,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": one["tokens"]} for one in asked],
        [SamplingParams(max_tokens=one["max_tokens"], temperature=0, ignore_eos=True) for one in asked],
        use_tqdm=False,
    )
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
