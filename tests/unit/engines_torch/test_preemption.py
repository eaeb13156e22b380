"""A KV cache so small that most requests are preempted changes no answer and loses no block."""

from pathlib import Path

import numpy as np
import pytest

from blend_core.engines.base import StepWindow
from blend_core.engines.torch.engine import TorchEngine
from blend_core.request import Request, SamplingParams
from tests.unit.engines_torch.reference import Reference
from tests.unit.engines_torch.runs import ListSource, Outcome, options, request, run

NUM_BLOCKS = 32
MAX_TOKENS = (1, 30, 80, 150)
IDENTICAL_SHARE = 0.99


def mixed_requests(num_requests: int) -> list[Request]:
    """Prompts of 1 to 300 tokens, half of them behind a shared start; answers of 1 to 150 tokens."""
    rng = np.random.default_rng(5)
    shared = rng.integers(3, 1024, 100)
    requests = []
    for seq in range(num_requests):
        own = rng.integers(3, 1024, rng.integers(1, 200))
        prompt = np.concatenate([shared, own]) if seq % 2 else own
        sampling = SamplingParams(MAX_TOKENS[seq // 2 % len(MAX_TOKENS)], temperature=0, ignore_eos=True)
        requests.append(request(seq, prompt, sampling))
    return requests


@pytest.mark.parametrize("policy", ["fcfs", "dual_scan"])
def test_preempted_requests_answer_as_undisturbed_ones_do(tiny_llama: Path, policy: str) -> None:
    requests = mixed_requests(24)
    undisturbed = run(tiny_llama, ListSource(requests, policy=policy), policy=policy)
    assert undisturbed.total("num_preempted") == 0

    engine = TorchEngine(
        options(tiny_llama, policy=policy, num_blocks=NUM_BLOCKS, max_num_seqs=16, max_num_batched_tokens=128)
    )
    engine.open()
    disturbed = Outcome()
    for event in engine.run(ListSource(requests, policy=policy)):
        disturbed.add(event)
        engine.check_integrity()
        if isinstance(event, StepWindow):
            assert event.kv_usage <= 1
    assert engine.num_referenced_blocks == 0

    assert disturbed.total("num_preempted") >= 6
    assert not disturbed.failed
    expected = [token for tokens in undisturbed.tokens.values() for token in tokens]
    found = [token for tokens in disturbed.tokens.values() for token in tokens]
    same = sum(one == other for one, other in zip(expected, found, strict=True))
    assert same >= IDENTICAL_SHARE * len(expected)
    reference = Reference(tiny_llama)
    for one in requests:
        if disturbed.tokens[one.seq] != undisturbed.tokens[one.seq]:
            reference.check(one, disturbed.tokens[one.seq])


def test_the_whole_cache_is_free_again_after_a_run_full_of_preemptions(tiny_llama: Path) -> None:
    requests = mixed_requests(12)
    engine = TorchEngine(options(tiny_llama, num_blocks=NUM_BLOCKS, max_num_seqs=16))
    engine.open()
    tokens = []
    for _ in range(2):
        outcome = Outcome()
        for event in engine.run(ListSource(requests)):
            outcome.add(event)
        engine.check_integrity()
        assert engine.num_referenced_blocks == 0
        assert outcome.total("num_preempted") > 0
        tokens.append(outcome.tokens)
    assert tokens[0] == tokens[1]
