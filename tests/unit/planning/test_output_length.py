"""Output lengths: exact where preset, from samples nearby, else from the bounds."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from blend_core.output_length import OutputLengths, choose_samples, estimate_output_lengths
from blend_core.prefix_tree import build_prefix_tree
from blend_core.request import RequestArrays

MakeRequests = Callable[..., RequestArrays]


def estimate(requests: RequestArrays, samples: Mapping[int, int] | None = None) -> OutputLengths:
    return estimate_output_lengths(requests, build_prefix_tree(requests, 1), samples)


def test_preset_lengths_are_exact(make_requests: MakeRequests) -> None:
    lengths = estimate(make_requests([[1], [2]], max_tokens=[64, 1], min_tokens=[64, 0]), {0: 7, 99: 5})
    # Request 0 has run and ended early; 1 can have one token only.
    assert lengths.mean.tolist() == [7, 1]
    assert lengths.known.all()
    assert estimate(make_requests([[1]], max_tokens=64)).mean.tolist() == [64]


def test_without_samples_a_length_is_uniform_within_its_bounds(make_requests: MakeRequests) -> None:
    lengths = estimate(make_requests([[1]], max_tokens=99, min_tokens=1))
    assert lengths.mean.tolist() == [50]
    assert lengths.second_moment[0] == pytest.approx(50**2 + 98**2 / 12)
    assert not lengths.known.any()


def test_samples_of_the_own_subtree_count_and_others_do_not(make_requests: MakeRequests) -> None:
    prompts = [[1, 1], [1, 2], [1, 3], [2, 1], [2, 2]]
    lengths = estimate(make_requests(prompts, max_tokens=1000, min_tokens=0), {0: 10, 1: 20, 3: 500})
    assert lengths.mean.tolist() == [10, 20, 15, 500, 500]
    assert lengths.second_moment.tolist() == [100, 400, 250, 250_000, 250_000]
    assert lengths.known.tolist() == [True, True, False, True, False]


def test_a_subtree_without_samples_takes_those_of_its_sibling(make_requests: MakeRequests) -> None:
    prompts = [[1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 2], [2, 1], [2, 2]]
    lengths = estimate(make_requests(prompts, max_tokens=1000, min_tokens=0), {0: 10, 4: 700})
    assert lengths.mean.tolist() == [10, 10, 10, 10, 700, 700]


def test_under_the_root_samples_of_the_same_bound_count(make_requests: MakeRequests) -> None:
    requests = make_requests([[1], [2], [3], [4], [5]], max_tokens=[50, 50, 900, 900, 70], min_tokens=0)
    lengths = estimate(requests, {0: 10, 2: 800})
    assert lengths.mean.tolist() == [10, 10, 800, 800, 70]
    # The last one has no like: it takes the mean of all, 405, and its bound.
    assert lengths.second_moment.tolist() == [100, 100, 640_000, 640_000, 4900]


def test_samples_of_other_requests_count_for_the_job(make_requests: MakeRequests) -> None:
    lengths = estimate(make_requests([[1], [2]], max_tokens=100, min_tokens=0), {7: 10, 8: 30})
    assert lengths.mean.tolist() == [20, 20]
    assert lengths.second_moment.tolist() == [500, 500]


def test_preset_lengths_say_nothing_about_hidden_ones(make_requests: MakeRequests) -> None:
    requests = make_requests([[1, 1], [1, 2]], max_tokens=[500, 100], min_tokens=[500, 100 - 1])
    lengths = estimate(requests, {0: 500})
    assert lengths.mean.tolist() == [500, 99.5]


def test_estimates_keep_to_the_bounds(make_requests: MakeRequests) -> None:
    requests = make_requests([[1, 1], [1, 2], [1, 3]], max_tokens=[100, 20, 100], min_tokens=[0, 0, 90])
    lengths = estimate(requests, {0: 50})
    assert lengths.mean.tolist() == [50, 20, 90]
    assert (lengths.second_moment >= lengths.mean**2).all()


def test_samples_are_one_percent_spread_over_subtrees(make_requests: MakeRequests) -> None:
    prompts = [[group, i] for group in range(10) for i in range(1000)]
    requests = make_requests(prompts, max_tokens=100, min_tokens=0)
    tree = build_prefix_tree(requests, 1)
    chosen = choose_samples(tree, np.ones(len(tree), dtype=np.bool_), 0.01, seed=3)
    assert len(chosen) == 100
    assert np.bincount(chosen // 1000).tolist() == [10] * 10
    assert (chosen == choose_samples(tree, np.ones(len(tree), dtype=np.bool_), 0.01, seed=3)).all()


@pytest.mark.parametrize(("num_hidden", "num_samples"), [(0, 0), (1, 1), (10, 3), (200, 32), (5000, 50)])
def test_small_jobs_get_some_samples_but_not_all(
    make_requests: MakeRequests, num_hidden: int, num_samples: int
) -> None:
    requests = make_requests([[i] for i in range(6000)], max_tokens=100, min_tokens=0)
    tree = build_prefix_tree(requests, 1)
    hidden = np.arange(6000) < num_hidden
    chosen = choose_samples(tree, hidden, 0.01, seed=0)
    assert len(set(chosen.tolist())) == num_samples
    assert (chosen < num_hidden).all()
    assert len(choose_samples(tree, hidden, 0.0, seed=0)) == 0
