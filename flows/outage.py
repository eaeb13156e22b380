"""Work that outlasts a database or an object store which is away for a while."""

import time
from collections.abc import Callable
from typing import TypeVar

from blend_core.errors import SourceUnavailableError, StorageUnavailableError
from flows.stopping import StopReason, StopSignal

GIVE_UP_AFTER_S = 600.0
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 5.0

Value = TypeVar("Value")


def through_outages(
    work: Callable[[], Value],
    stop: StopSignal,
    note: Callable[[str], None],
    *,
    how_far: Callable[[], int] = lambda: 0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Value:
    """Does the work, again and again while a service that it needs does not answer, and returns its value.

    Between two tries it waits, each time longer, up to `LONGEST_DELAY_S`. A try that came
    further than those before it ended their outage, however long it took; its own failure begins a new one.

    Args:
        work: safe to repeat wherever it broke off.
        stop: INTERRUPTED ends the waiting; under any other reason the work still has to be settled.
        note: told once per outage.
        how_far: how far the work has come; rises with nothing but progress that stays. Work that is done or
            not needs none.
        clock: gives rising seconds.
        sleep: waits where nothing can be asked to stop any more.

    Raises:
        StorageUnavailableError: the database or the object store was away for `GIVE_UP_AFTER_S`, or the
            process was told to end while it was away.
        SourceUnavailableError: the same of a source.
    """
    away_since_s: float | None = None
    delay_s = FIRST_DELAY_S
    reached = how_far()
    while True:
        try:
            return work()
        except (StorageUnavailableError, SourceUnavailableError) as error:
            now_s = clock()
            reached_before, reached = reached, how_far()
            if away_since_s is None or reached > reached_before:
                away_since_s, delay_s = now_s, FIRST_DELAY_S
                note(f"{error} It is tried again, for {GIVE_UP_AFTER_S / 60:.0f} minutes.")
            if stop.reason is StopReason.INTERRUPTED or now_s - away_since_s >= GIVE_UP_AFTER_S:
                raise
        if stop.reason is None:
            stop.wait(delay_s)
        else:
            sleep(delay_s)
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)
