"""Every request is answered once, and greedy tokens are those of vLLM with its own scheduler."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from blend_core.engines.vllm.engine import VllmEngine
from blend_core.request import Request, SamplingParams
from tests.integration.engines_vllm.vllm_runs import Block32Source, run_with_policy
from tests.unit.engines_torch.reference import Reference
from tests.unit.engines_torch.runs import request

NUM_REQUESTS = 500
MAX_TOKENS = (1, 4, 30, 90)
IDENTICAL_SHARE = 0.99


def mixed_requests() -> list[Request]:
    """Prompts of 1 to 250 tokens, most behind one of three shared starts; answers of 1 to 90 tokens."""
    rng = np.random.default_rng(11)
    starts = [rng.integers(3, 1024, length) for length in (64, 100, 150)]
    requests = []
    for seq in range(NUM_REQUESTS):
        own = rng.integers(3, 1024, rng.integers(1, 100))
        prompt = np.concatenate([starts[seq % 3], own]) if seq % 4 else own
        length = MAX_TOKENS[seq // 4 % len(MAX_TOKENS)]
        requests.append(request(seq, prompt, SamplingParams(length, temperature=0, ignore_eos=True)))
    return requests


@pytest.fixture(scope="module")
def plain_tokens(tiny_llama: Path) -> dict[int, tuple[int, ...]]:
    """What vLLM answers by itself, with ample KV."""
    return tokens_of_plain_vllm(tiny_llama, mixed_requests())


def tokens_of_plain_vllm(folder: Path, requests: Sequence[Request]) -> dict[int, tuple[int, ...]]:
    from vllm import LLM
    from vllm import SamplingParams as VllmSampling

    llm = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=2001,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        seed=0,
    )
    prompts = [{"prompt_token_ids": one.prompt_token_ids.tolist()} for one in requests]
    sampling = [
        VllmSampling(max_tokens=one.sampling.max_tokens, temperature=0, ignore_eos=True) for one in requests
    ]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return {
        one.seq: tuple(output.outputs[0].token_ids) for one, output in zip(requests, outputs, strict=True)
    }


@pytest.mark.parametrize("policy", ["fcfs", "density_matched"])
def test_greedy_tokens_are_those_of_plain_vllm_preemptions_included(
    scarce: VllmEngine, tiny_llama: Path, plain_tokens: dict[int, tuple[int, ...]], policy: str
) -> None:
    requests = mixed_requests()

    outcome = run_with_policy(scarce, Block32Source(requests, policy=policy), policy)

    assert not outcome.failed
    assert sorted(outcome.finished) == list(range(NUM_REQUESTS))
    if policy == "fcfs":
        assert outcome.total("num_preempted") > 20
    expected = [token for _, tokens in sorted(plain_tokens.items()) for token in tokens]
    found = [token for tokens in outcome.tokens.values() for token in tokens]
    same = sum(one == other for one, other in zip(expected, found, strict=True))
    assert same >= IDENTICAL_SHARE * len(expected)
    reference = Reference(tiny_llama)
    for one in requests:
        if outcome.tokens[one.seq] != plain_tokens[one.seq]:
            # A difference may come only where the two best logits are nearly equal.
            reference.check(one, outcome.tokens[one.seq])
