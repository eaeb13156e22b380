"""Every request is answered once, and greedy tokens are those of vLLM with its own scheduler."""

import json
import subprocess
import sys
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
def plain_tokens(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[int, ...]]:
    """What vLLM answers by itself with ample KV, in a process of its own."""
    folder = tmp_path_factory.mktemp("plain")
    asked = [
        {"tokens": one.prompt_token_ids.tolist(), "max_tokens": one.sampling.max_tokens}
        for one in mixed_requests()
    ]
    (folder / "asked.json").write_text(json.dumps(asked))
    script = Path(__file__).with_name("plain_vllm.py")
    subprocess.run([sys.executable, str(script), str(tiny_llama), str(folder)], check=True)
    answers = json.loads((folder / "answers.json").read_text())
    return {seq: tuple(tokens) for seq, tokens in enumerate(answers)}


@pytest.mark.parametrize("policy", ["fcfs", "density_matched"])
def test_greedy_tokens_are_those_of_plain_vllm_preemptions_included(
    engine: VllmEngine, tiny_llama: Path, plain_tokens: dict[int, tuple[int, ...]], policy: str
) -> None:
    requests = mixed_requests()

    outcome = run_with_policy(engine, Block32Source(requests, policy=policy), policy)

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
