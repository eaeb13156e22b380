"""Plans with what earlier nights tell: their means, no samples, and kinds of their own."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from blend_core.length_distribution import LENGTH_GRID, LengthDistribution, learn_lengths, length_counts
from blend_core.length_groups import MAX_NUM_GROUPS
from blend_core.length_priors import (
    MAX_NUM_TEMPLATES,
    MAX_PRIOR_WEIGHT,
    LengthPriors,
    TemplateLengths,
    first_length,
)
from blend_core.plan import LengthGroup, Plan
from blend_core.planner import PlanConfig, build_plan
from blend_core.request import RequestArrays
from blend_core.specs import DeviceProfile, ModelSpec

MakeRequests = Callable[..., RequestArrays]

BOUND = 1000


def lengths_of(answers: Sequence[int]) -> TemplateLengths:
    counts = length_counts(answers)
    return TemplateLengths(
        num_answers=float(len(answers)),
        sum_tokens=float(sum(answers)),
        sum_tokens_sq=float(sum(answer * answer for answer in answers)),
        bins=tuple((first_length(place), counts[place]) for place in np.flatnonzero(counts).tolist()),
    )


SHORT, LONG = lengths_of([20, 30] * 100), lengths_of([700, 900] * 100)


def two_templates(make_requests: MakeRequests, num_requests: int = 400) -> RequestArrays:
    """Prompts that share nothing, of one bound."""
    return make_requests([[i, 1, i] for i in range(num_requests)], max_tokens=BOUND, min_tokens=0)


def alternating(requests: RequestArrays, templates: tuple[TemplateLengths, ...]) -> LengthPriors:
    return LengthPriors(requests.seq % len(templates), templates)


def plan_of(
    requests: RequestArrays,
    model: ModelSpec,
    device: DeviceProfile,
    priors: LengthPriors | None,
    policy: str = "density_matched",
    samples: dict[int, int] | None = None,
) -> Plan:
    plan = build_plan(requests, model, device, PlanConfig(policy, 16), samples, priors=priors)
    plan.check_integrity()
    return plan


def group_of(plan: Plan, seq: int) -> LengthGroup:
    return plan.length_groups[plan.length_group[np.flatnonzero(plan.seq == seq)[0]]]


@pytest.mark.parametrize("policy", ["dual_scan", "density_matched"])
def test_what_earlier_nights_tell_is_not_sampled_and_estimated_as_it_was(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile, policy: str
) -> None:
    requests = two_templates(make_requests)
    unknown = plan_of(requests, llama_8b, a100, None, policy)
    plan = plan_of(requests, llama_8b, a100, alternating(requests, (SHORT, LONG)), policy)

    assert unknown.lead.any()
    assert not plan.lead.any()
    is_short = plan.seq % 2 == 0
    assert set(plan.estimated_output_tokens[is_short]) == {25.0}
    assert set(plan.estimated_output_tokens[~is_short]) == {800.0}
    assert set(plan.estimated_output_tokens_sq[~is_short]) == {(700**2 + 900**2) / 2}
    # Compute-intensive first: those with the short answers.
    assert np.flatnonzero(is_short).max() < np.flatnonzero(~is_short).min()


def test_kinds_have_one_template_and_its_histogram_scaled_down(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    requests = two_templates(make_requests)
    plan = plan_of(requests, llama_8b, a100, alternating(requests, (SHORT, LONG)))

    for seq, lengths in ((0, SHORT), (1, LONG)):
        group = group_of(plan, seq)
        assert sum(count for _, count in group.counts) == pytest.approx(MAX_PRIOR_WEIGHT)
        assert [first_length(place) for place, _ in group.counts] == [length for length, _ in lengths.bins]
    of_kind = [set(plan.seq[plan.length_group == kind] % 2) for kind in range(len(plan.length_groups))]
    assert sorted(map(len, of_kind)) == [1, 1]


def test_too_few_answers_tell_nothing(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    requests = two_templates(make_requests)
    few = alternating(requests, (lengths_of([20] * 31), lengths_of([900] * 31)))

    plan = plan_of(requests, llama_8b, a100, few)

    assert plan.to_arrow() == plan_of(requests, llama_8b, a100, None).to_arrow()


def test_requests_of_a_new_template_are_sampled_and_no_others(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    requests = two_templates(make_requests)
    priors = LengthPriors(np.where(requests.seq % 2 == 0, 0, -1), (SHORT,))

    for policy in ("dual_scan", "density_matched"):
        plan = plan_of(requests, llama_8b, a100, priors, policy)
        assert plan.lead.any()
        assert set(plan.seq[plan.lead] % 2) == {1}


def test_answers_of_tonight_count_beside_those_of_earlier_nights(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    requests = two_templates(make_requests)
    samples = dict.fromkeys(range(0, 128, 2), 125)

    plan = plan_of(requests, llama_8b, a100, alternating(requests, (SHORT, LONG)), samples=samples)

    # 64 earlier answers of 25 tokens in the mean and 64 of 125.
    assert set(plan.estimated_output_tokens[plan.seq % 2 == 0]) == {75.0}
    assert set(plan.estimated_output_tokens[plan.seq % 2 == 1]) == {800.0}
    assert sum(count for _, count in group_of(plan, 128).counts) == pytest.approx(128)


def test_a_bound_below_earlier_answers_bounds_estimate_and_histogram(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    requests = make_requests([[i] for i in range(100)], max_tokens=500, min_tokens=0)
    plan = plan_of(requests, llama_8b, a100, alternating(requests, (LONG,)))

    assert set(plan.estimated_output_tokens) == {500.0}
    ((place, count),) = group_of(plan, 0).counts
    assert LENGTH_GRID[place] <= 500 < LENGTH_GRID[place + 1]
    assert count == pytest.approx(MAX_PRIOR_WEIGHT)


def test_preset_lengths_stay(make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile) -> None:
    requests = make_requests([[i] for i in range(100)], max_tokens=10)
    plan = plan_of(requests, llama_8b, a100, alternating(requests, (LONG,)))
    assert set(plan.estimated_output_tokens) == {10.0}
    assert set(plan.length_group) == {-1}


def test_of_very_many_templates_the_largest_are_told_apart() -> None:
    num_templates = MAX_NUM_TEMPLATES + 10
    # The first ten have one request each, the others two.
    template = np.concatenate((np.arange(10), np.repeat(np.arange(10, num_templates), 2)))
    telling = LengthPriors(template, (SHORT,) * num_templates).telling()
    assert len(set(telling[telling >= 0].tolist())) == MAX_NUM_TEMPLATES
    assert set(telling[:10].tolist()) == {-1}


def test_many_templates_under_many_bounds_are_few_kinds_of_one_template_each(
    make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile
) -> None:
    bounds = [2 + number % 997 for number in range(4000)]
    requests = make_requests([[number] for number in range(4000)], max_tokens=bounds, min_tokens=0)
    priors = alternating(requests, (SHORT, LONG) * (MAX_NUM_TEMPLATES // 2))

    plan = plan_of(requests, llama_8b, a100, priors)

    assert len(plan.length_groups) <= MAX_NUM_GROUPS
    for kind in range(len(plan.length_groups)):
        assert len(set(plan.seq[plan.length_group == kind] % MAX_NUM_TEMPLATES)) == 1


def test_a_kind_that_earlier_nights_tell_is_not_drawn_towards_others_of_its_bound() -> None:
    short, long = (LengthDistribution(BOUND, lengths.counts(BOUND)) for lengths in (SHORT, LONG))
    unknown = LengthDistribution(BOUND)
    nobody = np.zeros(len(LENGTH_GRID))

    learn_lengths([(short, nobody), (long, nobody), (unknown, nobody)])

    assert short.mean == pytest.approx(25, rel=0.1)
    assert long.mean == pytest.approx(800, rel=0.1)
    assert unknown.mean == pytest.approx(412, rel=0.1)


def test_earlier_nights_fade() -> None:
    first = lengths_of([10] * 1000)
    second = lengths_of([500] * 1000).after(first)
    assert second.num_answers == 1500
    assert second.sum_tokens == 10 * 500 + 500 * 1000
    assert second.sum_tokens_sq == 10**2 * 500 + 500**2 * 1000
    assert dict(second.bins) == {8: 500.0, first_length(int(np.argmax(length_counts([500])))): 1000.0}
    nights = first
    for _ in range(8):
        nights = lengths_of([500] * 1000).after(nights)
    assert nights.sum_tokens / nights.num_answers == pytest.approx(500, rel=0.01)


def test_a_small_job_does_not_wipe_out_what_a_large_one_told() -> None:
    nights = lengths_of([500] * 3000)
    for _ in range(10):
        nights = lengths_of([10] * 10).after(nights)
    assert nights.num_answers == pytest.approx(3000)
    assert nights.sum_tokens / nights.num_answers > 450


def test_one_huge_night_is_forgotten_in_a_few_nights() -> None:
    nights = lengths_of([500] * 100_000)
    for _ in range(10):
        nights = lengths_of([10] * 1000).after(nights)
    assert nights.sum_tokens / nights.num_answers < 50
