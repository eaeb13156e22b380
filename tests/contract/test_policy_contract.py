"""What `AdmissionPolicy` promises, for every policy on every executor."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from cases import DEVICE, MODEL, ListSource, random_job
from checked_policy import CheckedPolicy
from fake_engine import FakeEngine

from blend_core.engines import simulated
from blend_core.engines.base import RequestFailed, RequestFinished, StepWindow
from blend_core.engines.simulated import SimulatedEngine
from blend_core.policies.base import EngineLimits, Side
from blend_core.policies.factory import POLICY_NAMES, make_policy

ROOMY = EngineLimits(block_size=4, num_blocks=200, max_num_seqs=16, max_num_batched_tokens=64)
TIGHT = EngineLimits(block_size=4, num_blocks=16, max_num_seqs=8, max_num_batched_tokens=16)


class FakeDriver:
    """The step-by-step engine of this suite."""

    def __init__(self, monkeypatch, tmp_path_factory):
        pass

    def run(self, source, policy_name, make, limits):
        return list(FakeEngine(limits).run(source, make))


class SimulatedDriver:
    """The simulated engine."""

    def __init__(self, monkeypatch, tmp_path_factory):
        self._monkeypatch = monkeypatch

    def run(self, source, policy_name, make, limits):
        self._monkeypatch.setattr(simulated, "make_policy", lambda name, plan, limits: make(plan, limits))
        engine = SimulatedEngine(
            MODEL,
            DEVICE,
            limits,
            policy_name,
            overlap=False,
            output_lengths=lambda request: request.sampling.max_tokens,
        )
        engine.open()
        return list(engine.run(source))


class TorchDriver:
    """The torch engine on a tiny random model."""

    def __init__(self, monkeypatch, tmp_path_factory):
        pytest.importorskip("torch")
        self._monkeypatch = monkeypatch
        self._folder = tmp_path_factory.getbasetemp() / "contract-tiny-llama"
        if not self._folder.exists():
            path = Path(__file__).parents[1] / "tiny_llama.py"
            spec = importlib.util.spec_from_file_location("tiny_llama", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            module.make_tiny_llama(self._folder)

    def run(self, source, policy_name, make, limits):
        from blend_core.engines.torch import run as torch_run
        from blend_core.engines.torch.engine import TorchEngine
        from blend_core.engines.torch.options import TorchEngineOptions

        self._monkeypatch.setattr(torch_run, "make_policy", lambda name, plan, limits: make(plan, limits))
        engine = TorchEngine(
            TorchEngineOptions(
                model_folder=str(self._folder),
                policy=policy_name,
                device_profile=DEVICE,
                dtype="float32",
                block_size=limits.block_size,
                num_blocks=limits.num_blocks,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                num_threads=1,
            )
        )
        engine.open()
        events = []
        for event in engine.run(source):
            engine.check_integrity()
            events.append(event)
        engine.close()
        return events


@pytest.fixture(params=[FakeDriver, SimulatedDriver, TorchDriver], ids=["fake", "simulated", "torch"])
def executor(request, monkeypatch, tmp_path_factory):
    return request.param(monkeypatch, tmp_path_factory)


@pytest.fixture(params=POLICY_NAMES)
def policy_name(request):
    return request.param


def run(executor, policy_name, job, limits, source=None):
    """Runs a job to its end; returns the checked policy and the events."""
    made = []
    outliving = [seq for seq, length in enumerate(job.output_tokens) if length >= 2 * job.estimates[seq]]

    def make(plan, limits):
        made.append(CheckedPolicy(make_policy(policy_name, plan, limits), plan, limits, outliving))
        return made[-1]

    events = executor.run(source or ListSource(job, job.plan()), policy_name, make, limits)
    return made[0], events


def endings(events):
    return [event for event in events if isinstance(event, RequestFinished | RequestFailed)]


@pytest.mark.parametrize("limits", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("wrong", [False, True], ids=["exact", "wrong-estimates"])
def test_everything_finishes_exactly_once_with_its_own_length(executor, policy_name, limits, wrong):
    job = random_job(seed=1, wrong=wrong)
    policy, events = run(executor, policy_name, job, limits)
    lengths = {event.seq: event.num_output_tokens for event in endings(events)}
    assert len(endings(events)) == len(job.prompts)
    assert lengths == dict(enumerate(job.output_tokens))
    assert policy.num_waiting == 0


def test_memory_that_runs_out_preempts_and_loses_nothing(executor, policy_name):
    job = random_job(seed=5, max_output=40)
    # A policy that looks ahead runs out of memory only where answers are longer than it was told.
    job = replace(job, estimates=[1.0] * len(job.prompts))
    policy, events = run(executor, policy_name, job, TIGHT)
    assert policy.num_preempted > 0
    assert len(policy.admissions) == len(job.prompts) + policy.num_preempted
    assert sorted(event.seq for event in endings(events)) == list(range(len(job.prompts)))


def test_a_prompt_longer_than_a_step_is_prefilled_in_chunks(executor, policy_name):
    job = random_job(seed=3, max_prompt=40)
    limits = EngineLimits(block_size=4, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=7)
    _, events = run(executor, policy_name, job, limits)
    assert all(isinstance(event, RequestFinished) for event in endings(events))


def test_a_revision_in_mid_run_keeps_everything(executor, policy_name):
    job = random_job(seed=4)
    names = list(range(len(job.prompts)))
    revisions = {3: job.plan(order=names[::-1], revision=1), 6: job.plan(order=names[5:], revision=4)}
    _, events = run(executor, policy_name, job, TIGHT, ListSource(job, job.plan(), revisions))
    assert sorted(event.seq for event in endings(events)) == names


def test_requests_withdrawn_while_waiting_or_running_leave_no_trace(executor, policy_name):
    job = random_job(seed=5)
    source = ListSource(job, job.plan(), withdrawals={1: [3, 4], 5: [7, 8, 9, 10]})
    _, events = run(executor, policy_name, job, TIGHT, source)
    ended = {event.seq for event in endings(events)}
    assert not ended & {3, 4}
    # Those of the second call may have ended before it, but none is left behind.
    assert ended | {3, 4, 7, 8, 9, 10} == set(range(len(job.prompts)))


def test_samples_lead_their_side(executor):
    job = random_job(seed=6)
    lead = [0, 2, 4, 11, 17]
    source = ListSource(job, job.plan(lead=lead))
    policy, _ = run(executor, "dual_scan", job, ROOMY, source)
    plan = job.plan()
    rho = plan.compute_s.sum() / plan.memory_s.sum()
    for side in Side:
        is_left = [rho <= plan.compute_s[plan.seq == seq] / plan.memory_s[plan.seq == seq] for seq in lead]
        leads = [seq for seq, left in zip(lead, is_left, strict=True) if left == (side is Side.LEFT)]
        first = [seq for seq in policy.admissions if policy.sides[seq] is side][: len(leads)]
        assert set(first) == set(leads)


def test_a_request_larger_than_the_cache_fails_and_the_rest_runs(executor, policy_name):
    job = random_job(seed=7, num_requests=6)
    job.prompts[2] = list(range(3, 103))
    _, events = run(executor, policy_name, job, TIGHT)
    failed = [event.seq for event in events if isinstance(event, RequestFailed)]
    assert failed == [2]
    assert len(endings(events)) == 6


@pytest.mark.parametrize(
    "executor", [SimulatedDriver, TorchDriver], ids=["simulated", "torch"], indirect=True
)
def test_windows_add_up_to_the_run(executor, policy_name):
    job = random_job(seed=8)
    policy, events = run(executor, policy_name, job, TIGHT)
    windows = [event for event in events if isinstance(event, StepWindow)]
    answers = [event for event in events if isinstance(event, RequestFinished)]
    assert [window.batch_index for window in windows] == list(range(len(windows)))
    assert sum(window.num_finished for window in windows) == len(job.prompts)
    assert sum(window.num_preempted for window in windows) == policy.num_preempted
    assert sum(window.num_cached_tokens for window in windows) == sum(a.num_cached_tokens for a in answers)
    # The first token of an answer comes from its prefill, and so does the one after a preemption.
    computed = sum(window.num_prefill_tokens + window.num_decode_tokens for window in windows)
    recomputed = sum(window.num_recomputed_tokens for window in windows)
    cached = sum(window.num_cached_tokens for window in windows)
    needed = sum(len(prompt) for prompt in job.prompts) + sum(job.output_tokens) - len(job.prompts)
    assert needed - cached <= computed <= needed - cached + recomputed + policy.num_preempted
