"""The nights of a nightly job: one job for each logical date, the missed ones, and what to do about them."""

import shlex
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from itertools import islice
from pathlib import Path

from cronsim import CronSim, CronSimError

from blend_core.errors import ConfigurationError
from flows.dates import local_date, time_zone
from flows.job_parts import CatchUp
from flows.job_spec import UNNAMED, BatchJobSpec, load_job_file
from flows.preflight import check_connections
from flows.running import create_job
from flows.serving import Serving
from flows.settings import NightlySettings, Settings
from flows.wiring import Wiring
from storage.database import Database
from storage.nights import NightJob, Nightly, list_nightlies, night_jobs, register_nightly

# A night's flow run needs a moment to start, and its job a moment to be written down.
GRACE = timedelta(minutes=15)
_NUM_CHECKED_FIRINGS = 400
_MAX_NIGHTS = 1_000
# From one 29th of February to the next, over a year that has none.
_LONGEST_WAIT = timedelta(days=8 * 366)
_FIRST_CHECKED_DAY = datetime(2024, 1, 1)


class NightState(StrEnum):
    """What is wrong with a night."""

    MISSED = "missed"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True)
class TroubledNight:
    """A night that should have been run.

    Attributes:
        logical_date: the night.
        state: missed (there is no job) or stuck (its job has not ended and nothing runs it).
        job_id: the stuck job.
    """

    logical_date: date
    state: NightState
    job_id: str | None = None

    def sentence(self, name: str) -> str:
        """What is wrong and what to do."""
        if self.job_id is None:
            day = self.logical_date
            command = shlex.join(("blend", "backfill", name, "--from", str(day), "--to", str(day)))
            return f"Night {day} of {name!r} was missed; `{command}` runs it."
        return (
            f"Night {self.logical_date} of {name!r} is stuck: nothing runs job {self.job_id}; "
            f"`blend run --job-id {self.job_id}` continues it."
        )


def scheduled_nights(cron: str, timezone: str, first: date, last: date) -> Iterator[tuple[date, datetime]]:
    """Every logical date from `first` to `last` on which a schedule fires, with the instant (UTC).

    Counted on the clocks of the zone, so that a change to or from daylight saving time neither adds nor takes
    a night: an hour that is skipped fires an hour later, one that is repeated fires the first time.

    Raises:
        ConfigurationError: the cron expression or the zone is none.
    """
    zone = time_zone(timezone)
    walls = _walls(cron, datetime.combine(first, datetime.min.time()) - timedelta(minutes=1))
    for wall in walls:
        if wall.date() > last:
            return
        yield wall.date(), wall.replace(tzinfo=zone).astimezone(UTC)


def night_job(file: Path) -> BatchJobSpec:
    """Reads the job file of a nightly job.

    Raises:
        ConfigurationError: there is no such file, it is wrong, or its job has no name of its own.
    """
    job = load_job_file(file)
    if job.name == UNNAMED:
        raise ConfigurationError(f"{file}: nights are known by the job's `name`; give it one of its own.")
    return job


def check_nightly(settings: Settings) -> None:
    """Checks what is to be scheduled, before a process is ended that schedules something else.

    Raises:
        ConfigurationError: the job file, the cron expression or the time zone is wrong, a connection of the
            job has no URL here, or the engine that it asks for cannot serve here.
    """
    nightly = settings.nightly
    if nightly.job is not None:
        job = night_job(nightly.job)
        check_connections(job, settings)
        Serving.of(settings.engine, job.options)
    check_schedule(nightly.cron, nightly.timezone)


def next_night(nightly: NightlySettings, now: datetime) -> datetime | None:
    """Returns when the nightly job runs next, in its time zone; None where there is none or it never does."""
    if nightly.job is None:
        return None
    zone = time_zone(nightly.timezone)
    first = now.astimezone(zone).date()
    nights = scheduled_nights(nightly.cron, nightly.timezone, first, first + _LONGEST_WAIT)
    return next((at.astimezone(zone) for _, at in nights if at > now), None)


def check_schedule(cron: str, timezone: str) -> None:
    """Checks that a nightly schedule fires at most once a day: a night is known by its day.

    Raises:
        ConfigurationError: it fires more often, or is no schedule.
    """
    time_zone(timezone)
    days = [wall.date() for wall in islice(_walls(cron, _FIRST_CHECKED_DAY), _NUM_CHECKED_FIRINGS)]
    if len(set(days)) < len(days):
        raise ConfigurationError(
            f"BLEND_NIGHTLY__CRON {cron!r} fires more than once a day, and a night is one logical date; give "
            "one time of day."
        )


def _walls(cron: str, start: datetime) -> Iterator[datetime]:
    try:
        yield from CronSim(cron, start)
    except CronSimError:
        raise ConfigurationError(
            f"BLEND_NIGHTLY__CRON {cron!r} is no schedule; give five cron fields such as `0 2 * * *`."
        ) from None


def register(wiring: Wiring, spec: BatchJobSpec, cron: str, timezone: str) -> Nightly:
    """Writes down that the job runs on this schedule, so that its nights can be missed."""
    return register_nightly(
        wiring.database,
        name=spec.name,
        cron=cron,
        timezone=timezone,
        catch_up=spec.catch_up.value,
        spec=spec.model_dump(mode="json"),
        home=serving_home(wiring.settings),
    )


def nights_that_end(wiring: Wiring) -> list[str]:
    """Names of the nightly jobs that were scheduled from this state folder and are not by its settings."""
    file, home = wiring.settings.nightly.job, serving_home(wiring.settings)
    name = None if file is None else night_job(file).name
    return [
        nightly.name
        for nightly in list_nightlies(wiring.database)
        if nightly.home == home and nightly.name != name
    ]


def serving_home(settings: Settings) -> str:
    """Machine and state folder, by which a process that serves anew knows what it served before."""
    return f"{socket.gethostname()}:{settings.home.absolute()}"


def create_night(
    wiring: Wiring, spec: BatchJobSpec, logical_date: date, *, again: bool = False
) -> tuple[str, bool]:
    """Writes down the job of one night and returns its id, and whether it is new.

    A night has one job, whoever asks however often. With `again`, one that failed, expired or was cancelled
    gets a new job.
    """
    key, known = f"night:{spec.name}:{logical_date}", night_jobs(wiring.database, spec.name).get(logical_date)
    if known is not None:
        if not again or not known.is_to_be_repeated:
            return known.job_id, False
        key = f"{key}#{known.attempt + 1}"
    job_id = create_job(wiring, spec, key, logical_date=logical_date, nightly=spec.name)
    return job_id, True


def known_night(db: Database, spec: BatchJobSpec, logical_date: date) -> NightJob | None:
    """The latest job of a night; None before the first."""
    return night_jobs(db, spec.name).get(logical_date)


def troubled_nights(db: Database, nightly: Nightly, now: datetime) -> list[TroubledNight]:
    """Nights of a nightly job that are missed or stuck, oldest first.

    A night counts from when the job was first served on its schedule, and is missed a quarter of an hour
    after its time.
    """
    zone = time_zone(nightly.timezone)
    jobs = night_jobs(db, nightly.name)
    first, last = nightly.since.astimezone(zone).date(), now.astimezone(zone).date()
    found = [
        TroubledNight(job.logical_date, NightState.STUCK, job.job_id)
        for job in jobs.values()
        if not job.status.is_end and not job.is_running
    ]
    found += [
        TroubledNight(day, NightState.MISSED)
        for day, at in scheduled_nights(nightly.cron, nightly.timezone, first, last)
        if nightly.since < at <= now - GRACE and day not in jobs
    ]
    return sorted(found, key=lambda night: night.logical_date)


def nights_to_catch_up(troubled: Sequence[TroubledNight], rule: CatchUp, before: date) -> list[TroubledNight]:
    """Which of the troubled nights the night `before` runs first."""
    earlier = [night for night in troubled if night.logical_date < before]
    if rule is CatchUp.NONE:
        return []
    return earlier if rule is CatchUp.ALL else earlier[-1:]


def is_overtaken(nightly: Nightly, logical_date: date, now: datetime) -> bool:
    """Whether a later night is due already: a flow run that starts so late belongs to a missed night."""
    day_after = logical_date + timedelta(days=1)
    last = now.astimezone(time_zone(nightly.timezone)).date()
    later = scheduled_nights(nightly.cron, nightly.timezone, day_after, last)
    return any(at <= now for _, at in later)


def backfill_dates(
    nightly: Nightly | None, first: date, last: date, now: datetime, timezone: str
) -> list[date]:
    """The logical dates of a range, by the clocks of a zone: those of the schedule, or every day without one.

    Raises:
        ConfigurationError: the range is empty, lies in the future, or is too long.
    """
    today = local_date(now, timezone)
    if last < first:
        raise ConfigurationError(f"--from {first} is after --to {last}; exchange them.")
    if last > today:
        raise ConfigurationError(f"--to {last} lies in the future; a night is filled in when it is over.")
    if (last - first).days >= _MAX_NIGHTS:
        raise ConfigurationError(f"The range is longer than {_MAX_NIGHTS} days; fill it in by parts.")
    if nightly is None:
        return [first + timedelta(days=number) for number in range((last - first).days + 1)]
    nights = list(scheduled_nights(nightly.cron, nightly.timezone, first, last))
    dates = [day for day, at in nights if at <= now]
    if len(dates) < len(nights):
        raise ConfigurationError(
            f"The night of {last} begins at {nights[-1][1].astimezone(time_zone(timezone)):%H:%M} and is "
            f"filled in when it is over; give --to {last - timedelta(1)}."
        )
    if not dates:
        raise ConfigurationError(
            f"The schedule {nightly.cron!r} of {nightly.name!r} has no night from {first} to {last}."
        )
    return dates
