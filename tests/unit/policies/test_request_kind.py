"""Sums over waiting requests, kept in constant time, against sums made anew."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend_core.length_distribution import LENGTH_GRID, LengthDistribution
from blend_core.performance import StepTimeModel
from blend_core.policies.base import Side
from blend_core.policies.request_kind import RequestKind, Work, request_work, total_work

TIMES = StepTimeModel(1e-3, 1e-5, 2e-3, 1e-9, 1e-7, 0.15)
# Prompt, tokens of it that are shared, output.
waiting = st.lists(
    st.tuples(st.integers(1, 2_000), st.integers(0, 2_000), st.integers(1, 3_000)).map(
        lambda row: (row[0], min(row[1], row[0] - 1), row[2])
    ),
    max_size=12,
)


def counted(kind, rows):
    for row in rows:
        kind.count(1, *row)
    return kind


def close(work, expected):
    for name in Work.__slots__:
        assert getattr(work, name) == pytest.approx(getattr(expected, name)), name


@given(waiting, waiting)
def test_known_lengths_are_summed_over_those_that_wait(stay, leave):
    kind = counted(RequestKind(None, Side.LEFT), stay + leave)
    for row in leave:
        kind.count(-1, *row)
    assert kind.num_waiting == len(stay)
    close(
        kind.work(),
        Work(
            sum(p - s for p, s, _ in stay),
            sum(p * p - s * s for p, s, _ in stay),
            sum(d for _, _, d in stay),
            sum(p * d + d * d / 2 for p, s, d in stay),
            sum((p - s) * d + d * d / 2 for p, s, d in stay),
        ),
    )


@given(waiting)
def test_a_new_distribution_counts_for_all_that_wait(rows):
    lengths = LengthDistribution(2_048)
    kind = counted(RequestKind(lengths, Side.LEFT), rows)
    for _ in range(50):
        lengths.observe(700)
    lengths.learn(np.zeros(len(LENGTH_GRID)))
    mean, second_moment = lengths.mean, lengths.second_moment
    assert 650 < mean < 750
    close(
        kind.work(),
        Work(
            sum(p - s for p, s, _ in rows),
            sum(p * p - s * s for p, s, _ in rows),
            len(rows) * mean,
            sum(p * mean + second_moment / 2 for p, s, _ in rows),
            sum((p - s) * mean + second_moment / 2 for p, s, _ in rows),
        ),
    )


@given(waiting)
def test_clearing_leaves_nothing(rows):
    kind = counted(RequestKind(None, Side.RIGHT), rows)
    kind.clear()
    assert kind.num_waiting == 0
    assert kind.work() == Work()


@given(waiting, waiting)
def test_the_total_of_kinds_is_that_of_their_requests(first, second):
    kinds = [counted(RequestKind(None, side), rows) for side, rows in zip(Side, (first, second), strict=True)]
    close(total_work(kinds), counted(RequestKind(None, Side.LEFT), first + second).work())
    assert total_work([]) == Work()


@given(waiting.filter(len))
def test_the_work_of_one_is_that_of_its_kind_alone(rows):
    prompt, shared, output = rows[0]
    alone = counted(RequestKind(None, Side.LEFT), rows[:1])
    close(request_work(prompt, shared, output, output * output), alone.work())


def test_density_is_compute_over_kv_reading():
    work = Work(num_prefill_tokens=900, prefill_tokens_sq=1e6, num_output_tokens=100, decode_kv_tokens=1e5)
    assert work.density(TIMES) == pytest.approx((1e-5 * 1_000 + 1e-9 * 1e6) / (1e-7 * 1e5))
    assert Work(num_prefill_tokens=1).density(TIMES) == float("inf")
