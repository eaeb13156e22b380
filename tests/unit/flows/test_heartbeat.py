import logging
import threading

import pytest

from flows.heartbeat import Heartbeat

LONG_S = 60.0


def test_a_beat_that_fails_is_logged_and_the_next_one_comes(caplog: pytest.LogCaptureFixture) -> None:
    beats: list[int] = []
    went_on = threading.Event()

    def beat() -> None:
        beats.append(len(beats))
        if len(beats) < 3:
            raise ValueError("a kind of error that nobody thought of")
        went_on.set()

    with caplog.at_level(logging.ERROR, "flows.heartbeat"), Heartbeat("lease", 0.001, beat):
        assert went_on.wait(LONG_S)

    assert [record.message for record in caplog.records] == ["A beat of lease failed"] * 2


def test_no_beat_comes_after_the_block() -> None:
    first = threading.Event()
    beats: list[None] = []

    def beat() -> None:
        beats.append(None)
        first.set()

    with Heartbeat("lease", 0.001, beat):
        assert first.wait(LONG_S)
    num_beats = len(beats)

    assert not threading.Event().wait(0.05)
    assert len(beats) == num_beats
