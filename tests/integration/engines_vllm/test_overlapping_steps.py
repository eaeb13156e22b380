"""vLLM's real scheduler under ours with steps that overlap, as on GPUs: no model, tokens made up here.

vLLM on a CPU neither schedules ahead nor runs a pipeline; what a step tells is known to its scheduler alone.
"""

import copy
import sys
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))

from checked_policy import CheckedPolicy

from blend_core.engines.vllm.engine import VllmEngine
from blend_core.engines.vllm.reports import Stepped
from blend_core.policies.factory import POLICY_NAMES, make_policy
from blend_core.request import Request, SamplingParams
from tests.integration.engines_vllm.vllm_runs import Block32Source
from tests.unit.engines_torch.runs import random_requests

NUM_BLOCKS = 24
ANSWER = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)


class Budgeted(CheckedPolicy):
    """Remembers the prompt tokens that it allowed the latest step."""

    budget = 0

    def begin_step(self, view: Any) -> int:
        self.budget = super().begin_step(view)
        return self.budget


@dataclass(frozen=True)
class Step:
    """A step that was scheduled: what came of it, and the KV that its decoding reads, counted plainly."""

    output: Any
    sampled: dict[str, list[int]]
    decode_kv_tokens: int


class OverlappingCore:
    """vLLM's loop over its scheduler, with `depth` steps at once and no model.

    It asks for the bitmask of a step at once, or, as vLLM where that needs the tokens of the step before,
    when that is through.

    Attributes:
        policy: the policy, checked at every call.
        steps: those that are through.
        reports: of the scheduler, of steps that computed something.
    """

    def __init__(
        self,
        engine: VllmEngine,
        requests: list[Request],
        policy: str,
        mode: str,
        *,
        needs_tokens: bool = False,
    ) -> None:
        from blend_core.engines.vllm import scheduler as module

        core = engine._opened.core._llm_engine.engine_core.engine_core
        config = copy.copy(core.vllm_config)
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.scheduler_config.async_scheduling = mode == "async"
        config.parallel_config.pipeline_parallel_size = 2 if mode == "pipeline" else 1
        kind = module.scheduler_class(is_async=mode == "async").rpartition(".")[2]
        self.scheduler = getattr(module, kind)(
            vllm_config=config,
            kv_cache_config=core.scheduler.kv_cache_config,
            structured_output_manager=core.structured_output_manager,
            block_size=core.scheduler.block_size,
            hash_block_size=core.scheduler.hash_block_size,
        )
        self._is_async = mode == "async"
        self._needs_tokens = needs_tokens
        self.depth = config.max_concurrent_batches
        self.steps: list[Step] = []
        self.reports: list[Stepped] = []
        self._open: deque[Step] = deque()
        plan = Block32Source(requests, policy=policy).plan()
        limits = self.scheduler.control.limits()
        # Answers are longer than the plan says: a preempted request may have gone over to the other side.
        inner = make_policy(policy, plan, limits)
        self.policy = Budgeted(inner, plan, limits, may_change_sides=plan.seq.tolist())
        self.scheduler.admission.start(self.policy, plan.revision)
        for one in requests:
            self._add(one, core.request_block_hasher)

    def run(self) -> None:
        """Until everything has ended."""
        for _ in range(5_000):
            if not self.scheduler.has_requests() and not self._open:
                return
            self.step()
        raise AssertionError("it hangs")

    def step(self) -> None:
        """Schedules a step, and takes the tokens of the oldest where enough are on their way."""
        if self.scheduler.has_requests():
            self._open.append(self._schedule())
            if not self._needs_tokens:
                self._ask_for_bitmask()
            if len(self._open) < self.depth and (self._open[-1].sampled or self.scheduler.has_requests()):
                return
        step = self._open.popleft()
        self.scheduler.update_from_output(step.output, _model_output(step))
        self.scheduler.admission.flight.check_integrity()
        if self._needs_tokens and self._open:
            self._ask_for_bitmask()
        if step.output.total_num_scheduled_tokens:
            self.steps.append(step)
        self.scheduler.control.tell_all()
        self.reports += [one for one in self.scheduler.take_reports() if isinstance(one, Stepped)]

    def _ask_for_bitmask(self) -> None:
        latest = self._open[-1].output
        if latest.total_num_scheduled_tokens:
            assert self.scheduler.get_grammar_bitmask(latest) is None

    def _schedule(self) -> Step:
        scheduler = self.scheduler
        decoding = {one.request_id for one in scheduler.running if not one.is_prefill_chunk}
        output = scheduler.schedule()
        sampled, kv_tokens = {}, 0
        for id_, num_tokens in output.num_scheduled_tokens.items():
            one = scheduler.requests[id_]
            assert num_tokens == 1 or id_ not in decoding
            assert self._is_async or one.num_computed_tokens <= one.num_tokens, "its token is not known yet"
            sampled[id_] = [] if one.is_prefill_chunk else [7]
            # The last token of a prompt that is computed again had been decoded before.
            if id_ in decoding or (sampled[id_] and one.num_output_tokens):
                kv_tokens += one.num_computed_tokens
        num_prompt_tokens = sum(
            num for id_, num in output.num_scheduled_tokens.items() if id_ not in decoding
        )
        assert num_prompt_tokens <= self.policy.budget
        if not output.preempted_req_ids:
            # Nor may it compute fewer.
            num_decoding = len(decoding & output.num_scheduled_tokens.keys())
            budget = self.policy.budget if decoding else max(1, self.policy.budget)
            assert scheduler.max_num_scheduled_tokens == num_decoding + budget
        return Step(output, sampled, kv_tokens)

    def _add(self, one: Request, hasher: Any) -> None:
        from vllm.v1.request import Request as VllmRequest

        from blend_core.engines.vllm.requests import vllm_sampling

        tokens = one.prompt_token_ids.tolist()
        self.scheduler.add_request(
            VllmRequest(
                f"{one.seq}-x",
                tokens,
                vllm_sampling(one, 1, self.scheduler.max_model_len),
                None,
                block_hasher=hasher,
            )
        )


def _model_output(step: Step) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(step.sampled)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={id_: index for index, id_ in enumerate(ids)},
        sampled_token_ids=list(step.sampled.values()),
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("mode", ["async", "pipeline"])
@pytest.mark.parametrize("needs_tokens", [False, True])
def test_steps_that_overlap_are_counted_as_they_are_computed(
    engine: VllmEngine, policy: str, mode: str, needs_tokens: bool
) -> None:
    requests = [
        replace(one, sampling=replace(ANSWER, max_tokens=(60, 90, 1, 60)[one.seq % 4]))
        for one in random_requests(40, sampling=ANSWER)
    ]
    core = OverlappingCore(engine, requests, policy, mode, needs_tokens=needs_tokens)

    core.run()

    assert core.depth == 2
    assert core.policy.num_preempted > 0
    counts = [report.step.counts for report in core.reports]
    assert len(counts) == len(core.steps)
    assert [one.decode_kv_tokens for one in counts] == [step.decode_kv_tokens for step in core.steps]
    prompts = sum(one.num_prompt_tokens for one in requests)
    cached = sum(report.step.num_cached_tokens for report in core.reports)
    recomputed = sum(one.num_recomputed_tokens for one in counts)
    assert sum(one.num_prefill_tokens for one in counts) - recomputed + cached == prompts
    assert sum(one.num_decode_tokens for one in counts) == sum(
        one.sampling.max_tokens - 1 for one in requests
    )
    assert sum(report.num_finished for report in core.reports) == 40
    assert core.policy.num_waiting == 0
    assert not core.policy.in_flight
    assert core.scheduler.num_free_blocks() == NUM_BLOCKS


def test_a_policy_hears_of_the_tokens_of_a_pipeline_not_of_its_steps(engine: VllmEngine) -> None:
    core = OverlappingCore(engine, random_requests(12, sampling=ANSWER), "fcfs", "pipeline")
    ledger = core.policy._inner._ledger
    num_compared = 0
    for _ in range(60):
        core.step()
        for one in core.scheduler.running:
            if one.num_output_tokens:
                slot = ledger.slot_of[int(one.request_id.partition("-")[0])]
                assert abs(ledger.num_output_tokens(slot) - one.num_output_tokens) <= 2
                num_compared += 1
    assert num_compared > 100
