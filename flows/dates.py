"""The logical date of a job: which day it is about, and what its sources, names and tables make of that.

`from __future__ import annotations` must stay out of here: the job's form is built from what imports it.
"""

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from psycopg import sql
from pydantic_core import PydanticCustomError

from blend_core.errors import ConfigurationError

_PLACEHOLDER = re.compile(r"\{logical_date(?P<days>[+-]\d{1,4})?(?::(?P<format>[^{}]*))?\}")
_LOOKS_LIKE_ONE = re.compile(r"\{\s*logical_?date\b[^{}]*\}", re.IGNORECASE)
# A day has no hours, and names of months would change with the locale.
_DAY_DIRECTIVES = frozenset("YmdyjGVuUWw%")


def utc_now() -> datetime:
    """The time, aware."""
    return datetime.now(tz=UTC)


def time_zone(name: str) -> ZoneInfo:
    """A time zone by its IANA name.

    Raises:
        ConfigurationError: there is no such zone.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigurationError(
            f"There is no time zone {name!r}; give a name such as Europe/Berlin or UTC."
        ) from None


def local_date(instant: datetime, zone: str) -> date:
    """The day on the calendars of a zone at an (aware) instant.

    Raises:
        ConfigurationError: there is no such zone.
    """
    return instant.astimezone(time_zone(zone)).date()


def parse_date(text: str, origin: str) -> date:
    """A day written as 2026-11-28; `origin` names the option in errors.

    Raises:
        ConfigurationError: it is no day.
    """
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise ConfigurationError(f"{origin} {text!r} is no day; write it as 2026-11-28.")


def check_placeholders(text: str) -> str:
    """Returns the text if each of its `{logical_date…}` can be filled.

    Raises:
        ValueError: one has a format that a day does not have, or is misspelt.
    """
    for found in _LOOKS_LIKE_ONE.finditer(text):
        match = _PLACEHOLDER.fullmatch(found.group())
        if match is None:
            raise _refused(
                f"{found.group()} is not understood; write {{logical_date}}, {{logical_date:%Y/%m/%d}} or "
                "{logical_date-1} for the day before"
            )
        directives = re.findall(r"%(.?)", match["format"] or "")
        wrong = [directive for directive in directives if directive not in _DAY_DIRECTIVES or not directive]
        if wrong:
            raise _refused(
                f"{found.group()} has %{wrong[0]}, which a day does not have; use %Y %m %d %y %j %G %V %u"
            )
    return text


def fill_text(text: str, logical_date: date) -> str:
    """The text with the day in place of every `{logical_date}` and `{logical_date:FORMAT}`."""
    return _filled(text, logical_date, str)


def fill_query(query: str, logical_date: date) -> str:
    """The query with a literal in place of every placeholder: a `date`, or with a format a quoted text."""
    return _filled(query, logical_date, lambda value: sql.Literal(value).as_string(None))


def check_query_placeholders(query: str) -> str:
    """Like `check_placeholders`, for SQL.

    Raises:
        ValueError: also where a placeholder is in quotes: it becomes a literal of its own.
    """
    check_placeholders(query)
    for match in _PLACEHOLDER.finditer(query):
        if query[: match.start()].endswith(("'", '"')) or query[match.end() :].startswith(("'", '"')):
            raise _refused(
                f"{match.group()} becomes a quoted literal by itself; leave out the quotes around it"
            )
    return query


def _refused(reason: str) -> PydanticCustomError:
    """What a validator of the form may raise; its text goes in as a value, since it has braces itself."""
    return PydanticCustomError("logical_date", "{reason}", {"reason": reason})


def _filled(text: str, logical_date: date, write: Callable[[date | str], str]) -> str:
    def value(match: re.Match[str]) -> str:
        day = logical_date + timedelta(days=int(match["days"] or 0))
        return write(day if match["format"] is None else day.strftime(match["format"]))

    return _PLACEHOLDER.sub(value, text)
