"""Which nights a schedule has, on the clocks of its time zone."""

import asyncio
from datetime import UTC, date, datetime, timedelta

import pytest
from prefect.server.schemas.schedules import CronSchedule

from blend_core.errors import ConfigurationError
from flows.job_parts import CatchUp
from flows.nights import (
    NightState,
    TroubledNight,
    backfill_dates,
    check_schedule,
    is_overtaken,
    next_night,
    nights_to_catch_up,
    scheduled_nights,
)
from flows.settings import NightlySettings
from storage.nights import Nightly

SPRING, AUTUMN = date(2026, 3, 29), date(2026, 10, 25)
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def nightly(cron: str = "30 2 * * *", timezone: str = "Europe/Berlin") -> Nightly:
    return Nightly("tickets", cron, timezone, "none", {}, "here", EPOCH, EPOCH)


def nights(cron: str, timezone: str, first: date, last: date) -> list[tuple[date, datetime]]:
    return [(day, at.astimezone(UTC)) for day, at in scheduled_nights(cron, timezone, first, last)]


def test_a_night_that_does_not_exist_in_spring_is_run_once_an_hour_later() -> None:
    assert nights("30 2 * * *", "Europe/Berlin", SPRING - timedelta(1), SPRING + timedelta(1)) == [
        (date(2026, 3, 28), datetime(2026, 3, 28, 1, 30, tzinfo=UTC)),
        (date(2026, 3, 29), datetime(2026, 3, 29, 1, 30, tzinfo=UTC)),
        (date(2026, 3, 30), datetime(2026, 3, 30, 0, 30, tzinfo=UTC)),
    ]


def test_a_night_that_exists_twice_in_autumn_is_run_the_first_time() -> None:
    assert nights("30 2 * * *", "Europe/Berlin", AUTUMN, AUTUMN + timedelta(1)) == [
        (date(2026, 10, 25), datetime(2026, 10, 25, 0, 30, tzinfo=UTC)),
        (date(2026, 10, 26), datetime(2026, 10, 26, 1, 30, tzinfo=UTC)),
    ]


@pytest.mark.parametrize("day", [SPRING, AUTUMN])
@pytest.mark.parametrize("cron", ["30 2 * * *", "0 3 * * *", "15 0 * * 0"])
def test_prefects_own_schedule_fires_on_the_same_nights(day: date, cron: str) -> None:
    first, last = day - timedelta(3), day + timedelta(3)
    midnight = datetime.combine(first, datetime.min.time(), tzinfo=UTC) - timedelta(hours=2)
    schedule = CronSchedule(cron=cron, timezone="Europe/Berlin")
    fired = asyncio.run(schedule.get_dates(start=midnight, end=midnight + timedelta(days=7)))
    expected = [at for _, at in nights(cron, "Europe/Berlin", first, last)]
    assert [at.astimezone(UTC) for at in fired] == expected


@pytest.mark.parametrize(
    ("timezone", "day"),
    [
        ("America/Santiago", date(2026, 9, 6)),  # midnight itself is skipped
        ("Australia/Lord_Howe", date(2026, 10, 4)),  # by half an hour
        ("Pacific/Apia", date(2011, 12, 31)),  # the day before never was
    ],
)
def test_odd_changes_of_the_clock_neither_add_nor_take_a_night(timezone: str, day: date) -> None:
    found = [night for night, _ in scheduled_nights("15 0 * * *", timezone, day, day + timedelta(2))]
    assert found == [day, day + timedelta(1), day + timedelta(2)]


def test_a_schedule_of_several_times_a_day_is_no_nightly_one() -> None:
    check_schedule("0 2 * * 1-5", "Europe/Berlin")
    check_schedule("0 2 29 2 *", "UTC")
    for cron in ("0 * * * *", "0,30 2 * * *"):
        with pytest.raises(ConfigurationError, match="more than once a day"):
            check_schedule(cron, "Europe/Berlin")
    with pytest.raises(ConfigurationError, match="BLEND_NIGHTLY__CRON 'at two' is no schedule"):
        check_schedule("at two", "UTC")


def test_tonight_is_filled_in_by_its_schedule_and_not_by_a_backfill_before_it() -> None:
    late = nightly("30 23 * * *")
    at_noon = datetime(2026, 11, 29, 12, tzinfo=UTC)
    with pytest.raises(ConfigurationError, match=r"begins at 23:30 .* give --to 2026-11-28"):
        backfill_dates(late, date(2026, 11, 28), date(2026, 11, 29), at_noon, "Europe/Berlin")
    late_at_night = datetime(2026, 11, 29, 22, 31, tzinfo=UTC)
    assert (
        len(backfill_dates(late, date(2026, 11, 28), date(2026, 11, 29), late_at_night, "Europe/Berlin")) == 2
    )


def test_a_backfill_has_every_night_of_the_schedule_or_every_day_without_one() -> None:
    today, now = date(2026, 11, 29), datetime(2026, 11, 29, 12, tzinfo=UTC)
    weekdays = nightly("0 2 * * 1-5")
    assert backfill_dates(weekdays, date(2026, 11, 26), date(2026, 11, 29), now, "UTC") == [
        date(2026, 11, 26),
        date(2026, 11, 27),
    ]
    assert len(backfill_dates(None, date(2026, 11, 1), date(2026, 11, 7), now, "UTC")) == 7
    for first, last, reason in (
        (date(2026, 11, 7), date(2026, 11, 1), "exchange them"),
        (today, today + timedelta(1), "lies in the future"),
        (date(2020, 1, 1), today, "longer than 1000 days"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            backfill_dates(None, first, last, now, "UTC")
    with pytest.raises(ConfigurationError, match="has no night"):
        backfill_dates(weekdays, date(2026, 11, 28), date(2026, 11, 29), now, "UTC")


def test_the_rule_says_which_earlier_nights_are_run_first() -> None:
    troubled = [TroubledNight(date(2026, 11, day), NightState.MISSED) for day in (26, 27, 28, 29)]
    before = date(2026, 11, 29)
    assert nights_to_catch_up(troubled, CatchUp.ALL, before) == troubled[:3]
    assert nights_to_catch_up(troubled, CatchUp.LATEST, before) == troubled[2:3]
    assert nights_to_catch_up(troubled, CatchUp.NONE, before) == []


def test_a_night_is_overtaken_when_a_later_one_is_due() -> None:
    due = datetime(2026, 11, 29, 1, 30, tzinfo=UTC)
    assert not is_overtaken(nightly(), date(2026, 11, 28), due - timedelta(seconds=1))
    assert is_overtaken(nightly(), date(2026, 11, 28), due)


def test_a_missed_night_is_told_with_the_command_that_runs_it() -> None:
    missed = TroubledNight(date(2026, 11, 27), NightState.MISSED)
    assert "`blend backfill 'my job' --from 2026-11-27 --to 2026-11-27`" in missed.sentence("my job")
    stuck = TroubledNight(date(2026, 11, 27), NightState.STUCK, "job_x")
    assert "`blend run --job-id job_x`" in stuck.sentence("my job")


def test_the_next_night_is_told_in_its_own_time_zone() -> None:
    settings = NightlySettings(job="tickets.yaml", cron="30 2 * * *", timezone="Europe/Berlin")
    # Half past two has passed in Berlin, and on the next day clocks go forward.
    told = next_night(settings, datetime(2026, 3, 28, 1, 31, tzinfo=UTC))
    assert told is not None
    assert told.isoformat() == "2026-03-29T03:30:00+02:00"
    leap = settings.model_copy(update={"cron": "0 2 29 2 *", "timezone": "UTC"})
    assert next_night(leap, datetime(2026, 3, 1, tzinfo=UTC)) == datetime(2028, 2, 29, 2, tzinfo=UTC)
    assert next_night(NightlySettings(), datetime(2026, 3, 1, tzinfo=UTC)) is None
