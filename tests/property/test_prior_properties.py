"""Whatever earlier nights tell, plans hold what they promise of it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from blend_core.length_distribution import LENGTH_GRID, length_counts
from blend_core.length_priors import MAX_PRIOR_WEIGHT, LengthPriors, TemplateLengths, first_length
from blend_core.plan import Plan
from blend_core.planner import PlanConfig, build_plan
from blend_core.request import RequestArrays
from blend_core.specs import load_device_profile, model_spec_preset

MODEL = model_spec_preset("llama-3.1-8b")
DEVICE = load_device_profile("a100-80g")
LENGTHS = st.lists(st.integers(1, 2000), min_size=1, max_size=80)


def lengths_of(answers: list[int]) -> TemplateLengths:
    counts = length_counts(answers)
    return TemplateLengths(
        float(len(answers)),
        float(sum(answers)),
        float(sum(answer * answer for answer in answers)),
        tuple((first_length(place), counts[place]) for place in np.flatnonzero(counts).tolist()),
    )


@st.composite
def jobs(draw: st.DrawFn) -> tuple[RequestArrays, LengthPriors]:
    templates = draw(st.lists(LENGTHS, max_size=4))
    num_requests = draw(st.integers(1, 120))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = rng.integers(1, 50, num_requests)
    upper = rng.choice([1, 5, 300, 2000], num_requests)
    requests = RequestArrays(
        seq=np.arange(num_requests),
        token_ids=rng.integers(0, 3, int(sizes.sum())).astype(np.int32),
        offsets=np.concatenate(([0], np.cumsum(sizes))),
        min_tokens=np.where(rng.random(num_requests) < 0.2, upper, 0).astype(np.int32),
        max_tokens=upper.astype(np.int32),
    )
    template = rng.integers(-1, len(templates), num_requests) if templates else np.full(num_requests, -1)
    return requests, LengthPriors(template, tuple(map(lengths_of, templates)))


def plan_of(requests: RequestArrays, priors: LengthPriors, policy: str) -> Plan:
    plan = build_plan(requests, MODEL, DEVICE, PlanConfig(policy, 16), priors=priors)
    plan.check_integrity()
    return plan


@settings(max_examples=40, deadline=None)
@given(jobs(), st.sampled_from(["dual_scan", "density_matched"]), st.integers(0, 1000))
def test_what_is_told_leaves_no_leads_and_no_order_matters(
    job: tuple[RequestArrays, LengthPriors], policy: str, seed: int
) -> None:
    requests, priors = job
    plan = plan_of(requests, priors, policy)

    telling = priors.telling()
    assert not plan.lead[telling[plan.seq] >= 0].any()
    kinds: dict[int, set[int]] = {}
    for seq, kind in zip(plan.seq.tolist(), plan.length_group.tolist(), strict=True):
        if kind >= 0:
            kinds.setdefault(kind, set()).add(int(telling[seq]))
    assert all(len(templates) == 1 for templates in kinds.values())
    for kind, templates in kinds.items():
        (template,) = templates
        total = sum(count for _, count in plan.length_groups[kind].counts)
        weight = 0.0 if template < 0 else min(MAX_PRIOR_WEIGHT, priors.templates[template].num_answers)
        assert np.isclose(total, weight)
    rows = np.random.default_rng(seed).permutation(len(requests))
    assert plan_of(requests.take(rows), priors.take(rows), policy).to_arrow() == plan.to_arrow()


@given(LENGTHS)
def test_a_histogram_comes_back_as_it_went(answers: list[int]) -> None:
    lengths = lengths_of(answers)
    expected = length_counts(answers) * (lengths.weight / len(answers))
    assert np.allclose(lengths.counts(int(LENGTH_GRID[-1])), expected)


@given(LENGTHS, LENGTHS)
def test_fading_keeps_sums_and_bins_together(earlier: list[int], tonight: list[int]) -> None:
    both = lengths_of(tonight).after(lengths_of(earlier))
    assert np.isclose(sum(number for _, number in both.bins), both.num_answers)
    assert both.num_answers >= max(len(tonight), len(earlier))
    assert list(both.bins) == sorted(both.bins)
    assert min(*earlier, *tonight) <= both.sum_tokens / both.num_answers <= max(*earlier, *tonight)
    assert both.sum_tokens_sq / both.num_answers >= (both.sum_tokens / both.num_answers) ** 2 * (1 - 1e-9)
