"""Pools: what is shared within a kind, and that a larger pool begins with a smaller one."""

from pathlib import Path

import numpy as np
import pytest

from blend_core.errors import PlanError
from blend_core.studies import trace_lengths
from blend_core.studies.pools import (
    Draw,
    Pool,
    alternating,
    block_trace,
    concatenated,
    cut_to_kv,
    few_shot,
    generated,
    resampled,
)
from blend_core.studies.trace_lengths import BlockTrace, FewShotLengths, TraceLengths
from blend_core.studies.workload import seen_tokens

LENGTHS = TraceLengths(np.array([10, 20, 30]), np.array([1, 2, 3]))
QUESTIONS = FewShotLengths(np.array([100, 200]), np.array([0, 1, 1]), np.array([5, 6, 7]))
BLOCKS = BlockTrace(
    TraceLengths(np.array([10, 12, 4]), np.array([7, 8, 9])),
    np.array([1, 2, 3, 1, 2, 9, 5]),
    np.array([0, 3, 6, 7]),
    4,
)

DRAWS: dict[str, Draw] = {
    "resampled": resampled(LENGTHS),
    "generated": generated(trace_lengths.video_like, preset=True),
    "few_shot": few_shot(QUESTIONS, np.array([2, 4])),
    "alternating": alternating([resampled(LENGTHS), few_shot(QUESTIONS, np.array([2]))]),
}


def drawn(name: str, num_rows: int, seed: int = 3) -> Pool:
    return DRAWS[name](np.random.default_rng(np.random.SeedSequence(seed)), num_rows)


@pytest.mark.parametrize("name", ["resampled", "few_shot"])
def test_a_larger_pool_begins_with_the_smaller_one(name: str) -> None:
    small, large = drawn(name, 50), drawn(name, 500)
    head = large.requests.head(50)
    assert np.array_equal(head.segment_tokens, small.requests.segment_tokens)
    assert np.array_equal(large.num_output_tokens[:50], small.num_output_tokens)


@pytest.mark.parametrize("name", DRAWS)
def test_a_pool_is_sound_and_the_same_for_a_seed(name: str) -> None:
    pool, again, other = drawn(name, 60), drawn(name, 60), drawn(name, 60, seed=4)
    pool.requests.check_integrity()
    assert len(pool) == 60
    assert np.array_equal(pool.requests.segment_tokens, again.requests.segment_tokens)
    assert np.array_equal(pool.num_output_tokens, again.num_output_tokens)
    assert not np.array_equal(pool.requests.segment_tokens, other.requests.segment_tokens)
    assert (pool.num_output_tokens <= pool.requests.max_tokens).all()


def test_only_preset_lengths_are_told() -> None:
    told, hidden = drawn("generated", 50), drawn("resampled", 50)
    assert np.array_equal(told.requests.min_tokens, told.num_output_tokens)
    assert np.array_equal(told.requests.max_tokens, told.num_output_tokens)
    assert not hidden.requests.min_tokens.any()
    assert len(np.unique(hidden.requests.max_tokens)) == 1


def test_questions_share_their_subject_and_never_a_whole_prompt() -> None:
    pool = drawn("few_shot", 40)
    assert seen_tokens(pool.requests, 1).sum() == pool.requests.num_prompt_tokens.sum() - sum(
        [100, 200], int(pool.requests.segment_tokens[1::2].sum())
    )
    assert len(np.unique(pool.requests.segment_ids[1::2])) == 40


def test_a_block_trace_gives_each_request_once_with_its_blocks() -> None:
    pool = block_trace(BLOCKS)(np.random.default_rng(0), 10)
    assert sorted(pool.requests.num_prompt_tokens.tolist()) == [4, 10, 12]
    assert sorted(pool.num_output_tokens.tolist()) == [7, 8, 9]
    # The first two begin with blocks 1 and 2: eight tokens, whoever comes first.
    assert seen_tokens(pool.requests, 4).sum() == 8


def test_kinds_put_together_share_nothing_between_them() -> None:
    both = concatenated([drawn("few_shot", 20), drawn("few_shot", 20)])
    both.requests.check_integrity()
    assert seen_tokens(both.requests, 1).sum() == 2 * seen_tokens(drawn("few_shot", 20).requests, 1).sum()


def test_mooncake_shares_what_its_block_ids_say(traces: Path) -> None:
    pool = block_trace(trace_lengths.mooncake_conversation(traces))(np.random.default_rng(0), 100_000)
    pool.requests.check_integrity()
    share = seen_tokens(pool.requests, 16).sum() / pool.requests.num_prompt_tokens.sum()
    assert 0.3 < share < 0.5


@pytest.mark.parametrize("preset", [True, False])
def test_answers_end_where_kv_does(preset: bool) -> None:
    pool = generated(trace_lengths.video_like, preset=preset)(np.random.default_rng(1), 400)
    cut = cut_to_kv(pool, 20_000)
    num_kv_tokens = cut.requests.num_prompt_tokens + cut.num_output_tokens - 1
    assert num_kv_tokens.max() == 20_000
    is_cut = cut.num_output_tokens < pool.num_output_tokens
    assert 0 < is_cut.sum() < 400
    assert (cut.num_output_tokens[~is_cut] == pool.num_output_tokens[~is_cut]).all()
    if preset:
        assert (cut.requests.min_tokens == cut.num_output_tokens).all()
        assert (cut.requests.max_tokens == cut.num_output_tokens).all()
    else:
        assert (cut.requests.max_tokens == pool.requests.max_tokens).all()
    assert cut_to_kv(pool, 200_000) is pool
    with pytest.raises(PlanError, match="name a larger device"):
        cut_to_kv(pool, 50)
