"""What the kills of `make test-faults` come to: plan, tables and the last line."""

import random
from collections import Counter

import pytest
from faults.checks import Findings
from faults.kills import SHARES, Kill, in_order_of_time, plan_kills
from faults.outcome import Outcome, kill_table


def test_the_same_seed_plans_the_same_kills_and_another_seed_others() -> None:
    assert plan_kills(50, random.Random(7)) == plan_kills(50, random.Random(7))
    assert plan_kills(50, random.Random(7)) != plan_kills(50, random.Random(8))


def test_fifty_kills_are_at_least_five_of_each_component_through_every_stage() -> None:
    kills = plan_kills(50, random.Random(1))
    by_component = Counter(kill.component for kill in kills)

    assert by_component == SHARES
    assert min(by_component.values()) >= 5
    assert {kill.stage for kill in kills} == {"ingest", "plan", "infer", "export", "report"}
    assert {kill.stage for kill in kills if kill.component == "engine"} == {"infer"}


@pytest.mark.parametrize("num_kills", [1, 10, 25, 60])
def test_any_number_of_kills_is_spread_over_the_components(num_kills: int) -> None:
    by_component = Counter(kill.component for kill in plan_kills(num_kills, random.Random(1)))

    assert sum(by_component.values()) == num_kills
    assert all(abs(by_component[name] - share * num_kills / 50) < 1 for name, share in SHARES.items())


def test_the_kills_of_a_job_follow_its_stages() -> None:
    ordered = in_order_of_time(plan_kills(50, random.Random(1)))

    stages = ["ingest", "plan", "infer", "export", "report"]
    assert [stages.index(kill.stage) for kill in ordered] == sorted(
        stages.index(kill.stage) for kill in ordered
    )


def test_the_last_line_has_exactly_the_promised_fields() -> None:
    outcome = Outcome(kills=[Kill("s3", "plan", 0, 10, 2.0)], num_orphans=4)
    outcome.add(Findings(lost={"a": "", "b": ""}, duplicated={"c": ""}, sum_holds=False, has_ended=False))

    assert outcome.as_json(7) == {
        "kills": 1,
        "by_component": {"engine": 0, "flow": 0, "prefect": 0, "s3": 1, "postgres": 0},
        "lost": 2,
        "duplicated": 1,
        "orphans": 4,
        "unended": 1,
        "sum_holds": False,
        "seed": 7,
    }
    assert not outcome.is_clean


def test_an_engine_that_outlived_its_flow_run_is_no_clean_outcome() -> None:
    assert not Outcome(num_orphans=1).is_clean


def test_a_job_that_did_not_end_is_no_clean_outcome() -> None:
    outcome = Outcome()
    outcome.add(Findings(has_ended=False))

    assert not outcome.is_clean


def test_the_table_has_the_median_and_the_worst_time() -> None:
    kills = [Kill("s3", "plan", 0, 10, time_s) for time_s in (1.0, 9.0, 2.0)]

    assert kill_table(kills).splitlines()[-1] == "| s3 | 3 | 2.0 s | 9.0 s |"
