import threading
import time
from collections.abc import Iterator

from blend_core.engines.base import EngineEvent, RequestFailed
from blend_core.errors import RequestErrorCode
from flows.stages.stall_watch import StallWatch


def failed(seq: int) -> RequestFailed:
    return RequestFailed(seq, 0, RequestErrorCode.ENGINE_FAILED, "it failed", 0.0)


def test_an_engine_that_tells_nothing_is_ended() -> None:
    ended = threading.Event()

    def silent() -> Iterator[EngineEvent]:
        yield failed(0)
        assert ended.wait(10), "nobody ended the engine"

    with StallWatch(lambda: 0.1, ended.set, time.monotonic) as watch:
        assert [event.seq for event in watch.watched(silent()) if isinstance(event, RequestFailed)] == [0]

    assert ended.is_set()
    assert watch.silent_s is not None
    assert watch.silent_s > 0.1


def test_a_slow_reader_is_no_stall() -> None:
    ended = threading.Event()
    now_s = 0.0

    with StallWatch(lambda: 0.1, ended.set, lambda: now_s) as watch:
        for _ in watch.watched(iter([failed(0), failed(1)])):
            now_s += 60.0
            # Ten looks of the watch.
            time.sleep(0.1)

    assert not ended.is_set()
    assert watch.silent_s is None


def test_every_event_passes_in_order() -> None:
    events = [failed(seq) for seq in range(5)]

    with StallWatch(lambda: 60, lambda: None, time.monotonic) as watch:
        assert list(watch.watched(iter(events))) == events


def test_a_limit_that_shrinks_counts_for_a_wait_that_goes_on() -> None:
    ended = threading.Event()
    limits_s = [60.0]
    threading.Timer(0.2, limits_s.insert, [0, 0.1]).start()

    with StallWatch(lambda: limits_s[0], ended.set, time.monotonic) as watch, watch.waiting():
        assert ended.wait(10)


def test_a_wait_for_the_start_is_watched_too() -> None:
    ended = threading.Event()

    with StallWatch(lambda: 0.1, ended.set, time.monotonic) as watch:
        with watch.waiting():
            assert ended.wait(10)
        assert watch.silent_s is not None
