"""An even pace over what is left, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend_core.length_distribution import LENGTH_GRID, LENGTH_GRID_ENDS, LengthDistribution, length_counts
from blend_core.performance import StepTimeModel
from blend_core.policies.base import EngineLimits
from blend_core.policies.pace import Pace, RunningRequests, RunningWork, running_work
from blend_core.policies.request_kind import Work

LIMITS = EngineLimits(block_size=4, num_blocks=250, max_num_seqs=100, max_num_batched_tokens=64)
# A step's GEMM costs as much as 100 tokens whatever it computes, and weights are read as long as 150 take.
TIMES = StepTimeModel(1e-3, 1e-5, 1.5e-3, 0.0, 1e-7, 0.0)
LEFT = Work(num_prefill_tokens=4_000, num_output_tokens=400, decode_kv_tokens=50_000, held_kv_tokens=40_000)
RIGHT = Work(num_prefill_tokens=1_000, num_output_tokens=900, decode_kv_tokens=90_000, held_kv_tokens=60_000)


def running(**sums):
    return RunningWork(**sums)


def test_memory_spreads_what_is_left_over_the_steps_that_kv_takes():
    pace = Pace.of(LEFT, RIGHT, running(held_kv_tokens=100_000, num_output_tokens=10), LIMITS, TIMES)
    assert pace.num_steps == 200  # 200,000 token steps in 1,000 tokens of KV
    assert pace.prefill_tokens_per_step == 25
    assert pace.decode_kv_tokens_per_step == 1_200
    assert pace.left_kv_tokens == 0


def test_compute_spreads_it_over_the_steps_that_tokens_take():
    left = Work(num_prefill_tokens=60_000, num_output_tokens=100)
    pace = Pace.of(left, RIGHT, running(), LIMITS, TIMES)
    assert pace.num_steps == pytest.approx((61_000 + 1_000) / 64)
    assert pace.prefill_tokens_per_step == pytest.approx(61_000 / pace.num_steps)


def test_as_many_as_may_run_at_once_spread_it_over_the_steps_that_outputs_take():
    pace = Pace.of(LEFT, RIGHT, running(num_output_tokens=700), replace(LIMITS, max_num_seqs=4), TIMES)
    assert pace.num_steps == (400 + 900 + 700) / 4


def test_no_pace_is_faster_than_the_longest_answer():
    assert Pace.of(LEFT, RIGHT, running(longest_tokens=5_000), LIMITS, TIMES).num_steps == 5_000
    assert Pace.of(LEFT, RIGHT, running(), LIMITS, TIMES, longest_waiting=7_000).num_steps == 7_000


def test_the_left_side_is_given_what_its_next_kind_holds_at_the_pace():
    head = Work(num_prefill_tokens=100, held_kv_tokens=5_000)
    pace = Pace.of(LEFT, RIGHT, running(), LIMITS, TIMES, longest_waiting=1_000, left_head=head)
    # 4 prompt tokens a step, each of which holds KV for 50 steps.
    assert pace.left_kv_tokens == 200


def test_nothing_left_is_a_pace_of_nothing():
    pace = Pace.of(Work(), Work(), running(), LIMITS, TIMES, left_head=Work())
    assert pace == Pace(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, True)


def tokens(decode_kv, *, even=10_000, prefill=400.0, peak=0.0, decoding=50, right_now=0.0, full=0.0):
    pace = Pace(100, prefill, even, 0.0, full, 0.5, False)
    return pace.prefill_tokens(TIMES, decode_kv, right_now, lambda enough: min(peak, enough), decoding)


def test_a_step_that_reads_its_even_share_computes_its_even_share():
    assert tokens(10_000) == (400, 1)


def test_a_step_that_reads_more_computes_more_and_one_that_reads_less_computes_less():
    # In proportion, the fixed part of a step included: (400 + 100) x 1.5 - 100.
    assert tokens(15_000, peak=20_000) == (650, 1)
    assert tokens(5_000, peak=20_000) == (150, 0.5)


def test_tokens_that_cost_nothing_are_always_computed():
    # Up to the knee of 150 tokens, of which 100 are the fixed part and 10 decode.
    assert tokens(0, peak=20_000, decoding=10) == (40, 0)


def test_kv_that_only_the_left_side_would_fill_is_not_waited_for():
    assert tokens(4_000, peak=0) == (400, 1)
    assert tokens(4_000, peak=9_000, right_now=5_000) == (150, 0.5)


def test_a_step_with_much_to_decode_and_little_to_read_computes_nothing_rather_than_less():
    assert tokens(1_000, peak=20_000, decoding=400) == (0, 0.1)


@given(
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.floats(0, 1e4),
    st.floats(0, 1e6),
    st.integers(0, 5_000),
    st.floats(0, 1e6),
)
def test_never_less_than_nothing(decode_kv, even, prefill, peak, decoding, right_now):
    num_tokens, share = tokens(
        decode_kv, even=even, prefill=prefill, peak=peak, decoding=decoding, right_now=right_now
    )
    assert num_tokens >= 0
    assert 0 <= share <= 1


def test_where_every_step_has_to_be_full_none_is_held_back():
    assert tokens(5_000, peak=9_000, full=0.5)[0] == 150
    assert tokens(5_000, peak=9_000, full=0.75)[0] == 275
    assert tokens(5_000, peak=9_000, full=1.0)[0] == 400


def test_the_left_side_is_done_a_last_answer_before_the_end():
    pace = Pace.of(LEFT, RIGHT, running(longest_tokens=5_000), LIMITS, TIMES, left_output_tokens=1_000)
    assert pace.prefill_tokens_per_step == 5_000 / 4_000
    # But steps cannot compute more than they may.
    hurried = Pace.of(LEFT, RIGHT, running(longest_tokens=5_000), LIMITS, TIMES, left_output_tokens=4_999)
    assert hurried.prefill_tokens_per_step == 5_000 / ((5_000 + 1_300) / 64)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e4))
def test_more_kv_to_read_never_means_less_to_compute(less, more, prefill):
    less, more = sorted((less, more))
    assert tokens(less, prefill=prefill, peak=1e7)[0] <= tokens(more, prefill=prefill, peak=1e7)[0]


def of_kind(lengths, rows):
    """Requests of (output so far, KV tokens, tokens to come, in flight)."""
    columns = np.array(rows, dtype=float).T
    return RunningRequests(lengths, *columns[:3], columns[3] > 0)


def test_what_runs_is_summed_request_by_request():
    sums = running_work([of_kind(None, [(10, 110, 40, 1), (0, 30, 500, 1), (60, 200, 7, 0)])])
    assert sums.num_output_tokens == 547
    assert sums.held_kv_tokens == 110 * 40 + 40**2 / 2 + 30 * 500 + 500**2 / 2 + 200 * 7 + 7**2 / 2
    assert sums.longest_tokens == 500
    for place in range(0, 60, 3):
        step, end = LENGTH_GRID[place], LENGTH_GRID_ENDS[place]
        assert sums.kv_mean[place] == (step < 40) * (110 + end) + (step < 500) * (30 + end)
    assert not sums.kv_variance.any()


def test_hidden_lengths_are_summed_by_what_is_expected():
    lengths = LengthDistribution(4_096, length_counts(np.arange(50, 1_500, 5)))
    rows = np.array([[10, 110, 1, 1], [700, 730, 1, 1]], dtype=float)
    sums = running_work([of_kind(lengths, rows), of_kind(None, [(0, 20, 9, 1)])])
    mean, second_moment = lengths.remaining(rows[:, 0])
    assert sums.num_output_tokens == pytest.approx(mean.sum() + 9)
    held = rows[:, 1] @ mean + second_moment.sum() / 2 + 20 * 9 + 9**2 / 2
    assert sums.held_kv_tokens == pytest.approx(held)
    assert sums.longest_tokens == pytest.approx(mean.max())
    assert sums.kv_variance.max() > 0


def test_of_many_some_stand_for_all():
    generator = np.random.default_rng(0)
    lengths = LengthDistribution(4_096, length_counts(np.arange(50, 1_500, 5)))
    so_far, held = generator.integers(0, 1_200, 3_000), generator.integers(50, 150, 3_000)
    rows = np.stack((so_far, so_far + held, np.ones(3_000), np.ones(3_000)), axis=1)
    sums = running_work([of_kind(lengths, rows)])
    parts = [running_work([of_kind(lengths, rows[place : place + 200])]) for place in range(0, 3_000, 200)]
    assert sums.num_output_tokens == pytest.approx(sum(part.num_output_tokens for part in parts))
    exact = sum(part.kv_mean for part in parts)
    np.testing.assert_allclose(sums.kv_mean, exact, atol=0.01 * exact.max())
    spread = sum(part.kv_variance for part in parts)
    np.testing.assert_allclose(sums.kv_variance, spread, atol=0.02 * spread.max())


def test_known_lengths_of_many_are_summed_exactly():
    generator = np.random.default_rng(0)
    left, held = generator.integers(1, 2_000, 3_000), generator.integers(50, 150, 3_000)
    rows = np.stack((np.zeros(3_000), held, left, np.ones(3_000)), axis=1)
    sums = running_work([of_kind(None, rows)])
    assert sums.num_output_tokens == left.sum()
    for place in range(0, 80, 7):
        alive = left > LENGTH_GRID[place]
        assert sums.kv_mean[place] == pytest.approx((held[alive] + LENGTH_GRID_ENDS[place]).sum())
    assert not sums.kv_variance.any()


def test_one_that_outlived_its_known_length_has_a_token_to_go():
    assert running_work([of_kind(None, [(50, 150, -3, 1)])]).num_output_tokens == 1


def test_balancing_hides_what_is_more_than_a_step_takes_anyway():
    even = Pace.of(LEFT, RIGHT, running(), LIMITS, TIMES)
    fixed_s, token_s = even.num_steps * TIMES.gemm_fixed_s, 6_300 * TIMES.gemm_s_per_token

    def hidden_s(**changed):
        times = replace(TIMES, **changed)
        share = Pace.of(LEFT, RIGHT, running(), LIMITS, times).hidden_share
        compute_s = max(times.gemm_fixed_s * even.num_steps + token_s, times.weight_read_s * even.num_steps)
        return share * (compute_s + 140_000 * times.decode_s_per_kv_token)

    # Much reading hides all tokens, little reading as much as goes beyond the fixed part.
    much, little = 1e-3, (fixed_s + 0.2 * token_s) / 140_000
    assert hidden_s(weight_read_s=0.0, decode_s_per_kv_token=much) == pytest.approx(token_s)
    assert hidden_s(weight_read_s=0.0, decode_s_per_kv_token=little) == pytest.approx(0.2 * token_s)
    # What the fixed part hides it hides in any order.
    assert hidden_s(weight_read_s=0.0, decode_s_per_kv_token=1e-9) == 0.0
    # Tokens that are computed while the weights are read cost nothing if they are spread.
    weight_read_s = (fixed_s + 0.5 * token_s) / even.num_steps
    assert hidden_s(weight_read_s=weight_read_s, decode_s_per_kv_token=1e-9) == pytest.approx(0.5 * token_s)
    assert Pace.of(Work(), Work(), running(), LIMITS, TIMES).hidden_share == 0.0


def test_steps_bind_where_reading_weights_takes_longer_than_computing():
    # 6,300 tokens in 100 steps: 630 us a step beside the 1,000 of the fixed part.
    assert Pace.of(LEFT, RIGHT, running(), LIMITS, replace(TIMES, weight_read_s=1.7e-3)).is_step_bound
    assert not Pace.of(LEFT, RIGHT, running(), LIMITS, replace(TIMES, weight_read_s=1.6e-3)).is_step_bound
