"""Sampled requests with a seed whose prompts take several steps: all but the last of them draw nothing.

vLLM throws the token of such a step away; on a CPU it dies of that where the request has a seed, unless our
worker holds the request's generator back.
"""

from collections.abc import Iterable

import numpy as np

from blend_core.engines.vllm.engine import VllmEngine
from blend_core.request import Request, SamplingParams
from tests.integration.engines_vllm.vllm_runs import Block32Source, run_on
from tests.unit.engines_torch.runs import request

MAX_BATCHED_TOKENS = 128
SCHEMA = '{"enum": ["abcdefgh", "stuvwxyz", "12345678"]}'


def seeded(
    seq: int, prompt: Iterable[int], *, num_tokens: int = 12, json_schema: str | None = None
) -> Request:
    is_free = json_schema is None
    sampling = SamplingParams(
        num_tokens if is_free else 40,
        temperature=1.0,
        top_p=0.9 if seq % 2 else 1.0,
        seed=1_000 + seq,
        ignore_eos=is_free,
        json_schema=json_schema,
    )
    return request(seq, prompt, sampling)


def prompts(*lengths: int, seed: int) -> list[list[int]]:
    """Random ones, in each test others: what one leaves in the prefix cache is no other's."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 1024, length).tolist() for length in lengths]


def alone(engine: VllmEngine, requests: list[Request]) -> dict[int, tuple[int, ...]]:
    """Tokens of each request in a run of its own, where its prompt fits one step."""
    return {one.seq: run_on(engine, Block32Source([one])).tokens[one.seq] for one in requests}


def test_a_prompt_longer_than_a_step_is_answered_as_when_it_is_cached(either_engine: VllmEngine) -> None:
    asked = seeded(0, *prompts(2 * MAX_BATCHED_TOKENS + 40, seed=1))

    in_steps = run_on(either_engine, Block32Source([asked]))
    at_once = run_on(either_engine, Block32Source([asked]))

    assert in_steps.total("num_cached_tokens") == 0
    assert at_once.total("num_prefill_tokens") < MAX_BATCHED_TOKENS
    assert len(in_steps.tokens[0]) == 12
    assert in_steps.tokens == at_once.tokens


def test_prompts_that_are_cut_where_a_step_is_full_are_answered_as_alone(either_engine: VllmEngine) -> None:
    lengths = (100, 70, 90, 120, 3, 110)
    requests = [seeded(seq, prompt) for seq, prompt in enumerate(prompts(*lengths, seed=2))]
    # Beside them what has no seed, and what is sampled by a schema.
    unseeded, by_schema = prompts(100, 125, seed=3)
    requests.append(seeded(6, by_schema, json_schema=SCHEMA))
    beside = request(7, unseeded, SamplingParams(12, temperature=1.0, ignore_eos=True))

    together = run_on(either_engine, Block32Source([*requests, beside]))

    assert not together.failed
    assert together.finished.pop(7).num_output_tokens == 12
    assert together.finished[6].output_text.strip('"') in SCHEMA
    assert together.tokens == alone(either_engine, requests)


def test_preempted_requests_draw_on_where_they_were(either_engine: VllmEngine) -> None:
    requests = [seeded(seq, prompt, num_tokens=60) for seq, prompt in enumerate(prompts(*[40] * 14, seed=4))]

    together = run_on(either_engine, Block32Source(requests))

    assert together.total("num_preempted") > 0
    assert together.tokens == alone(either_engine, requests)
