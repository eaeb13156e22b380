"""No policy and no plan sees a true length before the run shows it."""

import inspect
from collections.abc import Sequence

import numpy as np
import pytest

from blend_core.engines.windows import StepWindow
from blend_core.planner import PLANNED_POLICIES, PlanConfig, build_plan
from blend_core.policies.base import AdmissionPolicy, EngineLimits, Side
from blend_core.policies.factory import make_policy
from blend_core.request import RequestArrays
from blend_core.simulation.prompts import PromptBlocks
from blend_core.simulation.stepper import SimulatedEnd, Stepper
from blend_core.specs import load_device_profile, model_spec_preset

MODEL = model_spec_preset("llama-3.1-8b")
DEVICE = load_device_profile("a100-80g")
BLOCK_SIZE = 16
NUM_REQUESTS = 200
LIMITS = EngineLimits(BLOCK_SIZE, num_blocks=400, max_num_seqs=64, max_num_batched_tokens=256)


def hidden_job() -> RequestArrays:
    """Groups of prompts that share two blocks; one bound for every answer."""
    prompts = np.repeat(np.arange(NUM_REQUESTS)[:, None] % 10, 40, axis=1)
    prompts[:, 32:] = np.arange(NUM_REQUESTS)[:, None]
    return RequestArrays(
        seq=np.arange(NUM_REQUESTS),
        token_ids=prompts.astype(np.int32).ravel(),
        offsets=np.arange(NUM_REQUESTS + 1) * 40,
        min_tokens=np.zeros(NUM_REQUESTS, dtype=np.int32),
        max_tokens=np.full(NUM_REQUESTS, 512, dtype=np.int32),
    )


def admissions(
    policy_name: str, output_tokens: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, int]]:
    """(seq, requests finished before) of every admission of a simulated run, in order."""
    requests = hidden_job()
    plan = build_plan(requests, MODEL, DEVICE, PlanConfig(policy_name, BLOCK_SIZE))
    policy = make_policy(policy_name, plan, LIMITS)
    num_finished = 0
    seen: list[tuple[int, int]] = []
    admitted = policy.admitted

    def recorded(seq: int, side: Side, num_cached_tokens: int) -> None:
        seen.append((seq, num_finished))
        admitted(seq, side, num_cached_tokens)

    monkeypatch.setattr(policy, "admitted", recorded)
    stepper = Stepper(
        requests.seq.tolist(),
        PromptBlocks.of(requests, BLOCK_SIZE),
        list(output_tokens),
        policy,
        MODEL,
        DEVICE,
        LIMITS,
        revision=0,
        overlap=True,
        started_at=0.0,
    )
    while not stepper.is_done:
        for event in stepper.advance():
            assert isinstance(event, SimulatedEnd | StepWindow)
            num_finished += isinstance(event, SimulatedEnd)
    return seen


@pytest.mark.parametrize("policy_name", PLANNED_POLICIES)
def test_admissions_before_the_first_end_do_not_depend_on_true_lengths(
    policy_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    runs = []
    for spread in (1, 50, 400):
        # Nothing ends in the first hundred tokens, whatever comes after them.
        output = 100 + generator.integers(0, spread, NUM_REQUESTS)
        runs.append(admissions(policy_name, output.tolist(), monkeypatch))
    early = [[seq for seq, num_finished in run if num_finished == 0] for run in runs]
    assert early[0] == early[1] == early[2]
    assert 5 < len(early[0]) < NUM_REQUESTS
    assert sorted({seq for seq, _ in runs[2]}) == list(range(NUM_REQUESTS))


def test_planner_and_policies_have_no_way_to_be_told() -> None:
    told = set(inspect.signature(build_plan).parameters) | set(
        inspect.signature(AdmissionPolicy.__init__).parameters
    )
    of_earlier_nights = {"priors"}
    assert told - of_earlier_nights == {
        "requests", "model", "device", "config", "samples", "revision", "self", "plan", "limits"
    }  # fmt: skip
