"""Mixed requests for dry runs: long shared prompts with short answers, and short prompts with long ones."""

from collections.abc import Callable

import numpy as np
import pytest

from blend_core.prefix_tree import build_prefix_tree
from blend_core.request import RequestArrays
from blend_core.specs import load_device_profile, model_spec_preset
from flows.dry_run.lengths import lengths_by_bounds
from flows.dry_run.target import Target, target_of
from flows.dry_run.workload import SimulationSize, Workload

MakeRequests = Callable[..., RequestArrays]
MakeWorkload = Callable[..., Workload]


@pytest.fixture
def a100() -> Target:
    return target_of(model_spec_preset("llama-3.1-8b"), load_device_profile("a100-80g"), block_size=16)


@pytest.fixture
def mixed() -> MakeRequests:
    def make(num_requests: int, long_answer: int = 600) -> RequestArrays:
        rng = np.random.default_rng(5)
        beginnings = [rng.integers(0, 30_000, 320) for _ in range(8)]
        prompts, max_tokens = [], []
        for number in range(num_requests):
            if number % 3:
                beginning = beginnings[int(rng.integers(8))]
                prompts.append(np.concatenate([beginning, rng.integers(0, 30_000, 40)]))
                max_tokens.append(4)
            else:
                prompts.append(rng.integers(0, 30_000, 50))
                max_tokens.append(long_answer)
        return RequestArrays(
            seq=np.arange(num_requests, dtype=np.int64),
            token_ids=np.concatenate(prompts).astype(np.int32),
            offsets=np.concatenate([[0], np.cumsum([len(prompt) for prompt in prompts])]).astype(np.int64),
            min_tokens=np.zeros(num_requests, dtype=np.int32),
            max_tokens=np.array(max_tokens, dtype=np.int32),
        )

    return make


@pytest.fixture
def few_long(a100: Target) -> MakeWorkload:
    """Prompts of their own with answers of 4 tokens, and a few with answers of up to `long_answer`."""

    def make(
        num_short: int,
        num_long: int,
        long_answer: int,
        *,
        is_preset: bool,
        overlap: bool = False,
        size: SimulationSize | None = None,
    ) -> Workload:
        rng = np.random.default_rng(3)
        num_requests, num_prompt_tokens = num_short + num_long, 120
        max_tokens = np.full(num_requests, 4, dtype=np.int32)
        max_tokens[rng.choice(num_requests, num_long, replace=False)] = long_answer
        requests = RequestArrays(
            seq=np.arange(num_requests, dtype=np.int64),
            token_ids=rng.integers(0, 30_000, num_requests * num_prompt_tokens).astype(np.int32),
            offsets=np.arange(num_requests + 1, dtype=np.int64) * num_prompt_tokens,
            min_tokens=max_tokens.copy() if is_preset else np.zeros(num_requests, dtype=np.int32),
            max_tokens=max_tokens,
        )
        tree = build_prefix_tree(requests, a100.limits.block_size)
        lengths = lengths_by_bounds(requests, tree, np.random.default_rng(0))
        return Workload(requests, tree, lengths, a100, overlap, size or SimulationSize())

    return make


@pytest.fixture
def workload(mixed: MakeRequests, a100: Target) -> MakeWorkload:
    def make(num_requests: int, *, overlap: bool = False, size: SimulationSize | None = None) -> Workload:
        requests = mixed(num_requests)
        tree = build_prefix_tree(requests, a100.limits.block_size)
        lengths = lengths_by_bounds(requests, tree, np.random.default_rng(0))
        return Workload(requests, tree, lengths, a100, overlap, size or SimulationSize())

    return make
