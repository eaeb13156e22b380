"""A request that takes too long becomes an error row in the engine's own loop; the others go on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from blend_core.engines.base import RequestsAdmitted
from blend_core.engines.torch.engine import TorchEngine
from blend_core.engines.torch.executor import SequentialExecutor
from blend_core.errors import ConfigurationError, EngineDiedError, RequestErrorCode
from blend_core.request import SamplingParams
from tests.unit.engines_torch.runs import ListSource, Outcome, options, request, run

LONG = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)


def ticking(step_s: float) -> Iterator[float]:
    now_s = 0.0
    while True:
        yield now_s
        now_s += step_s


def run_with_clock(folder: Path, source: ListSource, **changes: object) -> Outcome:
    """Runs on a clock that goes on by a second whenever it is looked at."""
    clock = ticking(1.0)
    engine = TorchEngine(options(folder, **changes), elapsed=lambda: next(clock))
    engine.open()
    outcome = Outcome()
    for event in engine.run(source):
        outcome.add(event)
    engine.check_integrity()
    assert engine.num_referenced_blocks == 0
    return outcome


def test_a_request_that_takes_too_long_fails_alone(tiny_llama: Path) -> None:
    requests = [request(0, range(3, 9)), request(1, range(3, 40), LONG), request(2, range(5, 15))]

    outcome = run_with_clock(tiny_llama, ListSource(requests), request_timeout_s=200)

    assert sorted(outcome.finished) == [0, 2]
    (failed,) = outcome.failed.values()
    assert (failed.seq, failed.code) == (1, RequestErrorCode.TIMED_OUT)
    assert "200 s" in failed.message
    assert "tokens of its answer" in failed.message
    assert outcome.total("num_finished") == 3


def test_requests_that_wait_their_turn_do_not_run_out_of_time(tiny_llama: Path) -> None:
    requests = [request(seq, range(3, 30)) for seq in range(30)]

    outcome = run_with_clock(tiny_llama, ListSource(requests), request_timeout_s=120, max_num_seqs=1)

    assert len(outcome.finished) == 30


def test_a_preempted_request_keeps_its_time_and_may_run_out_while_it_waits(tiny_llama: Path) -> None:
    requests = [request(seq, range(3 + seq, 33 + seq), LONG) for seq in range(6)]

    outcome = run_with_clock(tiny_llama, ListSource(requests), request_timeout_s=900, num_blocks=36)

    assert outcome.total("num_preempted") > 0
    assert {event.code for event in outcome.failed.values()} == {RequestErrorCode.TIMED_OUT}
    assert len(outcome.failed) + len(outcome.finished) == 6


def test_without_a_limit_nothing_times_out(tiny_llama: Path) -> None:
    assert run(tiny_llama, [request(0, range(3, 9), LONG)]).finished


def test_a_limit_of_nothing_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigurationError, match="request_timeout_s"):
        options(tiny_llama, request_timeout_s=0.0)


def test_requests_are_told_as_admitted_before_they_are_computed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: SequentialExecutor, batch: object) -> object:
        raise ValueError("in mid-step")

    monkeypatch.setattr(SequentialExecutor, "execute", fail)
    engine = TorchEngine(options(tiny_llama, max_num_seqs=3))
    engine.open()
    events = engine.run(ListSource([request(seq, range(3, 9)) for seq in range(10)]))

    assert next(events) == RequestsAdmitted((0, 1, 2))
    with pytest.raises(ValueError, match="mid-step"):
        next(events)


def test_a_step_without_enough_memory_is_the_engines_death(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def allocate(self: SequentialExecutor, batch: object) -> object:
        return torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr(SequentialExecutor, "execute", allocate)
    with pytest.raises(EngineDiedError, match=r"ran out of memory on cpu.*KV_GIB"):
        run(tiny_llama, [request(0, range(3, 9))])
