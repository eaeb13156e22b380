"""How long an engine that dies is started again."""

from flows.stages.restarts import RestartBudget, RestartRules

RULES = RestartRules(max_restarts=5, first_delay_s=1.0)


def test_a_crash_loop_ends_soon_and_pauses_longer_each_time() -> None:
    budget = RestartBudget(RULES)

    assert [budget.died() for _ in range(6)] == [1.0, 2.0, 4.0, 8.0, 16.0, None]
    assert budget.num_deaths == 6


def test_a_night_of_deaths_an_hour_apart_goes_on() -> None:
    budget = RestartBudget(RULES)

    for _ in range(32):
        budget.answered()
        assert budget.died() == 1.0


def test_a_pause_is_at_most_a_minute() -> None:
    budget = RestartBudget(RestartRules(max_restarts=20, first_delay_s=1.0))

    assert max(filter(None, (budget.died() for _ in range(20)))) == 60.0


def test_no_restart_at_all_can_be_asked_for() -> None:
    assert RestartBudget(RestartRules(max_restarts=0, first_delay_s=1.0)).died() is None
