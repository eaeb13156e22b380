"""Lengths of traces: read or generated, with the published means."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from blend_core.studies import trace_lengths
from blend_core.studies.trace_lengths import TraceLengths

MEANS = [
    (trace_lengths.azure_code, 2048, 28),
    (trace_lengths.deepseek_r1, 1282, 1499),
    (trace_lengths.sharegpt, 299, 324),
    (trace_lengths.lmsys, 92, 207),
    (trace_lengths.gsm8k, 59, 103),
]
IDS = [read.__name__ for read, _, _ in MEANS]


@pytest.mark.parametrize(("read", "prompt", "output"), MEANS, ids=IDS)
def test_traces_have_their_published_means(
    traces: Path, read: Callable[[Path | None], TraceLengths], prompt: int, output: int
) -> None:
    lengths = read(traces)
    assert lengths.num_prompt_tokens.mean() == pytest.approx(prompt, rel=0.02)
    assert lengths.num_output_tokens.mean() == pytest.approx(output, rel=0.02)
    assert lengths.num_prompt_tokens.min() >= 1
    assert lengths.num_output_tokens.min() >= 1


@pytest.mark.parametrize(("read", "prompt", "output"), MEANS, ids=IDS)
def test_generated_lengths_come_near_the_published_means_and_stay_the_same(
    read: Callable[[Path | None], TraceLengths], prompt: int, output: int
) -> None:
    lengths = read(None)
    # Heavy tails: the mean of 20,000 draws of a log-normal with CV 3.2 is off by some percent.
    assert lengths.num_prompt_tokens.mean() == pytest.approx(prompt, rel=0.08)
    assert lengths.num_output_tokens.mean() == pytest.approx(output, rel=0.08)
    assert np.array_equal(lengths.num_output_tokens, read(None).num_output_tokens)


@pytest.mark.parametrize("is_real", [True, False])
def test_mmlu_prompts_have_681_tokens_in_57_subjects(
    request: pytest.FixtureRequest, *, is_real: bool
) -> None:
    lengths = trace_lengths.mmlu_5shot(request.getfixturevalue("traces") if is_real else None)
    prompt = lengths.num_fewshot_tokens[lengths.subject] + lengths.num_question_tokens
    assert len(lengths.num_fewshot_tokens) == 57
    assert len(lengths.subject) == 14_042
    assert prompt.mean() == pytest.approx(681, rel=0.02 if is_real else 0.2)


def test_mooncake_blocks_cover_its_prompts(traces: Path) -> None:
    trace = trace_lengths.mooncake_conversation(traces)
    num_blocks = np.diff(trace.offsets)
    assert trace.lengths.num_prompt_tokens.mean() == pytest.approx(12_035, rel=0.01)
    assert np.all(num_blocks * trace.block_tokens >= trace.lengths.num_prompt_tokens)


def test_video_like_answers_are_long_spread_and_clipped() -> None:
    lengths = trace_lengths.video_like(np.random.default_rng(0), 50_000)
    output = lengths.num_output_tokens
    assert output.max() == 64_000
    assert output.mean() == pytest.approx(15_500, rel=0.03)
    assert 0.75 < output.std() / output.mean() < 1.0


def test_wildbench_answers_have_their_published_mean(traces: Path) -> None:
    assert trace_lengths.wildbench_outputs(traces).mean() == pytest.approx(546, rel=0.02)
    assert trace_lengths.wildbench_outputs(None).mean() == pytest.approx(546, rel=0.1)
