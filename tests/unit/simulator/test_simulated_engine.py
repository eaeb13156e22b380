"""The simulated engine says that it is one: no text, times of a device that need not be there."""

import numpy as np
import pytest

from blend_core.engines.base import RequestFinished, RequestsAdmitted, StepWindow
from blend_core.engines.simulated import SampledOutputLengths, SimulatedEngine
from blend_core.planner import PlanConfig, build_plan
from blend_core.policies.base import EngineLimits
from blend_core.request import Request, RequestArrays, SamplingParams
from blend_core.simulator import simulate
from blend_core.specs import load_device_profile, model_spec_preset

MODEL = model_spec_preset("llama-3.1-8b")
DEVICE = load_device_profile("a100-80g")
LIMITS = EngineLimits(16, 2_000, 64, 2_048)


class Source:
    """Requests with prompts of their own, `max_tokens` 20."""

    def __init__(self, num_requests):
        rng = np.random.default_rng(0)
        self.requests = [
            Request(seq, rng.integers(0, 1_000, 50 + seq).astype(np.int32), SamplingParams(20, min_tokens=5))
            for seq in range(num_requests)
        ]
        lengths = [request.num_prompt_tokens for request in self.requests]
        self.arrays = RequestArrays(
            seq=np.arange(num_requests, dtype=np.int64),
            token_ids=np.concatenate([request.prompt_token_ids for request in self.requests]),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            min_tokens=np.full(num_requests, 5, dtype=np.int32),
            max_tokens=np.full(num_requests, 20, dtype=np.int32),
        )

    def plan(self):
        return build_plan(self.arrays, MODEL, DEVICE, PlanConfig("dual_scan", 16))

    def fetch(self, seqs):
        return [self.requests[seq] for seq in seqs]

    def revision(self):
        return None

    def withdrawn(self):
        return ()


def engine(output_lengths, clock=lambda: 1_000.0):
    return SimulatedEngine(
        MODEL,
        DEVICE,
        LIMITS,
        "dual_scan",
        overlap=True,
        output_lengths=output_lengths,
        clock=clock,
    )


@pytest.fixture
def source():
    return Source(30)


def test_answers_are_empty_and_the_details_say_so(source):
    simulated = engine(SampledOutputLengths(seed=0))
    assert simulated.open().details["simulated"] == "true"
    answers = [event for event in simulated.run(source) if isinstance(event, RequestFinished)]
    assert len(answers) == 30
    assert {answer.output_text for answer in answers} == {""}
    assert all(set(answer.output_token_ids) == {0} for answer in answers)


def test_every_request_is_told_as_admitted_once_and_before_it_ends(source):
    admitted = []
    for event in engine(SampledOutputLengths(seed=0)).run(source):
        if isinstance(event, RequestsAdmitted):
            admitted += event.seqs
        elif isinstance(event, RequestFinished):
            assert event.seq in admitted
    assert sorted(admitted) == list(range(30))


def test_times_are_simulated_seconds_after_the_start(source):
    events = list(engine(lambda request: 20).run(source))
    answers = [event for event in events if isinstance(event, RequestFinished)]
    windows = [event for event in events if isinstance(event, StepWindow)]
    assert all(1_000.0 <= answer.started_at < answer.finished_at for answer in answers)
    assert max(answer.finished_at for answer in answers) == pytest.approx(
        1_000.0 + sum(window.duration_s for window in windows)
    )


def test_it_takes_as_long_as_the_simulator_says(source):
    events = list(engine(lambda request: 7, clock=lambda: 0.0).run(source))
    windows = tuple(event for event in events if isinstance(event, StepWindow))
    result = simulate(
        source.arrays, np.full(30, 7), source.plan(), "dual_scan", MODEL, DEVICE, LIMITS, overlap=True
    )
    assert windows == result.windows


def test_an_answer_as_long_as_allowed_ends_for_its_length(source):
    answers = [e for e in engine(lambda request: 99).run(source) if isinstance(e, RequestFinished)]
    assert {(answer.num_output_tokens, answer.finish_reason) for answer in answers} == {(20, "length")}
    answers = [e for e in engine(lambda request: 7).run(source) if isinstance(e, RequestFinished)]
    assert {(answer.num_output_tokens, answer.finish_reason) for answer in answers} == {(7, "stop")}


def test_sampled_lengths_are_within_bounds_and_the_same_for_a_seed(source):
    lengths = [SampledOutputLengths(seed=1)(request) for request in source.requests]
    assert lengths == [SampledOutputLengths(seed=1)(request) for request in source.requests]
    assert lengths != [SampledOutputLengths(seed=2)(request) for request in source.requests]
    assert 5 <= min(lengths) < max(lengths) <= 20
