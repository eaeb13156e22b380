"""A dry run names a policy that is notably faster than the job's."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from flows.dry_run.forecast import Forecast, faster_policy, forecast
from flows.dry_run.plan_sentences import faster_text
from flows.dry_run.workload import Workload


@pytest.fixture
def told(workload: Callable[..., Workload]) -> Forecast:
    return forecast(workload(60), "dfs", None, lambda text: None)


def with_durations(told: Forecast, **durations_s: float) -> Forecast:
    entries = tuple(
        replace(entry, estimated_duration_s=durations_s.get(entry.policy, 100.0)) for entry in told.policies
    )
    return replace(told, policies=entries)


def test_the_fastest_policy_is_named_with_what_it_saves(told: Forecast) -> None:
    changed = with_durations(told, dual_scan=90.0, density_matched=80.0)
    faster = faster_policy(changed)
    assert faster is not None
    assert faster_text(faster, changed.expected) == (
        "density_matched takes 1 min 20 s, 20.0% less; a job names it in options.policy"
    )


def test_a_policy_that_is_hardly_faster_is_not_named(told: Forecast) -> None:
    assert faster_policy(with_durations(told, dual_scan=98.5)) is None
    assert faster_policy(with_durations(told, dfs=90.0)) is None
